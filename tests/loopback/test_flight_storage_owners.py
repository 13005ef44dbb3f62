"""Storage servers come and go, in good order or killed, while a queue is used: each row is delivered or counted."""

from __future__ import annotations

import itertools
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pyarrow as pa
import pytest

from flight.client import QueueClient
from flight.errors import LeaseLostError
from flight.schema import Column, ConsumerSpec, TableSpec
from tests.kit.server import queue_server, storage_server
from tests.kit.storage import DEADLINE_S, ROW_BYTES, Stage, check, names, rows, rows_at, spec, until


@pytest.fixture
def stage() -> Iterator[Stage]:
    """A coordinator and what the test has join it."""
    with ExitStack() as stack:
        yield Stage(stack)


class Producers:
    """Threads that put four rows at a time until `stop`, or `num_puts` times each; `put` are the uids put so far."""

    def __init__(self, uri: str, *, num_puts: int | None = None) -> None:
        self.put: set[str] = set()
        self.failures: list[BaseException] = []
        self._uri = uri
        self._num_puts = num_puts
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(2)]
        for thread in self._threads:
            thread.start()

    @property
    def are_done(self) -> bool:
        """Return whether all have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Let each end after the put that it is at."""
        self._is_over.set()

    def join(self) -> None:
        """Wait for their end."""
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def _run(self, index: int) -> None:
        try:
            with QueueClient(self._uri, identity=f"p{index}", deadline_s=DEADLINE_S) as producer:
                for number in itertools.count() if self._num_puts is None else range(self._num_puts):
                    if self._is_over.is_set():
                        return
                    uids = names(f"{index}-{number}")
                    producer.put("rows", rows(*uids))
                    self.put.update(uids)
        except BaseException as error:
            self.failures.append(error)


def consume(client: QueueClient, acked: list[str]) -> int:
    """Take what is there within a moment, compare its bytes, ack it; return how many rows came."""
    lease = client.take("rows", "c", max_rows=8, deadline_s=0.3)
    check(lease.table)
    if lease.table.num_rows:
        with suppress(LeaseLostError):
            client.ack("rows", "c", lease_id=lease.lease_id)
            acked += lease.table["uid"].to_pylist()
    return lease.table.num_rows


def test_a_storage_server_joins_while_the_queue_is_used(stage):
    """Producers and consumers run on; new rows reach the new server, and all arrive once with their bytes."""
    client = stage.client()
    client.create_table(spec(capacity_rows=48))
    first, _ = stage.storage()
    acked: list[str] = []
    producers = Producers(stage.uri)
    try:
        until(lambda: consume(client, acked) > 0 and rows_at(client)[first] > 0)
        second, _ = stage.storage()
        until(lambda: consume(client, acked) > 0 and rows_at(client)[second] > 0)
        producers.stop()
        until(lambda: consume(client, acked) == 0 and producers.are_done)
    finally:
        producers.stop()
        producers.join()
    while consume(client, acked):
        pass
    assert producers.failures == []
    assert len(acked) == len(set(acked))
    assert set(acked) == producers.put
    assert client.stats("rows")["lost"] == 0


def test_rows_of_a_killed_owner_are_lost_and_counted_and_all_others_arrive(stage):
    """kill -9 while producers put and consumers take: each uid is acked once, or counted as lost."""
    client = stage.client()
    client.create_table(spec(consumers=(ConsumerSpec(name="c", columns=("x",)),), capacity_rows=64))
    stage.storage()
    second, victim = stage.storage()
    acked: list[str] = []
    producers = Producers(stage.uri, num_puts=24)
    try:
        until(lambda: consume(client, acked) > 0 and len(acked) > 40 and rows_at(client)[second] > 8)
        victim.kill()
        victim.wait()
        until(lambda: not consume(client, acked) and producers.are_done and not client.stats("rows")["rows"])
    finally:
        producers.join()
    assert producers.failures == []
    stats = client.stats("rows")
    assert len(acked) == len(set(acked)) == stats["consumers"]["c"]["acked"]
    assert len(producers.put) == 2 * 24 * 4
    # Each put of a row made it once, or once more after it was lost and its producer put it again.
    assert stats["put"] == stats["retired"] - stats["lost"] == len(acked)
    assert 0 < len(producers.put - set(acked)) <= stats["lost"] <= 64
    assert len(client.storage_servers()) == 1


def test_a_group_goes_with_its_lost_rows_and_the_end_comes(stage):
    """Nobody waits for what cannot come: half a group is not kept, and the table ends without it."""
    client = stage.client()
    groups = (ConsumerSpec(name="c", columns=("x",), sampler="groups"),)
    client.create_table(spec(consumers=groups, group_size=12))
    _, victim = stage.storage()
    client.put("rows", rows(*names("first", 12), group_id="g0"))
    client.put("rows", rows(*names("a", 6), group_id="g1"))
    survivor, _ = stage.storage()
    victim.kill()
    victim.wait()
    client.put("rows", rows(*names("b", 6), group_id="g1"))
    client.put("rows", rows(*names("c", 12), group_id="g2"))
    assert rows_at(client)[survivor] == 18
    client.seal("rows", 36)
    lease = client.take("rows", "c", max_rows=12)
    check(lease.table)
    assert set(lease.table["group_id"].to_pylist()) == {"g2"}
    assert client.ack("rows", "c", lease_id=lease.lease_id) == 12
    assert client.take("rows", "c", max_rows=12).status == "sealed"
    stats = client.stats("rows")
    assert (stats["lost"], stats["never_coming"], stats["rows"]) == (24, 24, 0)


def test_what_refers_to_lost_rows_is_lost_with_them_and_made_anew(stage):
    """Media at a storage server that is killed: no prompt is left without its picture, and both may come again."""
    client = stage.client()
    client.create_table(spec("media", consumers=()))
    shows = Column(name="shows", type=pa.list_(pa.string()), meaning="media", references="media")
    wants = ConsumerSpec(name="c", columns=("shows",))
    client.create_table(TableSpec(name="prompts", columns=(shows,), consumers=(wants,)))
    _, victim = stage.storage()

    def put_prompts(**refers_to: list[str]) -> None:
        wanted = [each for uids in refers_to.values() for each in uids]
        if missing := client.missing("media", wanted):
            client.put("media", rows(*missing))
        table = pa.table({"uid": list(refers_to), "shows": list(refers_to.values())})
        client.put("prompts", table.cast(pa.schema([("uid", pa.string()), ("shows", shows.type)])))

    pictures = names("picture", 12)
    put_prompts(p=pictures[:1], q=pictures[1:])
    put_prompts(plain=[])
    survivor, _ = stage.storage()
    victim.kill()
    victim.wait()
    assert client.read("media").num_rows == 0
    assert client.missing("media", pictures) == pictures
    assert client.take("prompts", "c", max_rows=9).table["uid"].to_pylist() == ["plain"]
    put_prompts(p=pictures[:1], q=pictures[1:])
    lease = client.take("prompts", "c", max_rows=9)
    assert lease.table["uid"].to_pylist() == ["p", "q"]
    found = client.read("media")
    check(found)
    assert rows_at(client) == {survivor: 12}
    assert client.ack("prompts", "c", lease_id=lease.lease_id) == 2
    until(lambda: rows_at(client) == {survivor: 0})
    assert [client.stats(table)["lost"] for table in ("media", "prompts")] == [12, 2]


def test_a_storage_server_that_is_told_to_end_lets_its_rows_be_finished(stage):
    """SIGTERM: no new rows, and it ends by itself with its last row; nothing is lost."""
    client = stage.client()
    client.create_table(spec())
    first, leaver = stage.storage()
    client.put("rows", rows(*names("a", 12)))
    second, _ = stage.storage()
    leaver.terminate()
    until(lambda: {each["state"] for each in client.storage_servers()} == {"open", "leaving"})
    for tag in "bc":
        client.put("rows", rows(*names(tag, 12)))
    assert rows_at(client) == {first: 12, second: 24}
    with pytest.raises(subprocess.TimeoutExpired):
        leaver.wait(0.5)
    lease = client.take("rows", "c", max_rows=36)
    check(lease.table)
    assert lease.table.num_rows == 36
    client.ack("rows", "c", lease_id=lease.lease_id)
    assert leaver.wait(DEADLINE_S) == 0
    assert client.stats("rows")["lost"] == 0
    until(lambda: list(rows_at(client)) == [second])


def test_a_full_storage_server_sends_producers_elsewhere(stage):
    """Its capacity is its own; what nobody has room for stays with the coordinator."""
    client = stage.client()
    client.create_table(spec())
    small, _ = stage.storage("--capacity-bytes", str(13 * ROW_BYTES))
    client.put("rows", rows(*names("a", 12)))
    client.put("rows", rows(*names("b", 12)))
    assert rows_at(client) == {small: 12}
    assert client.stats("rows")["bytes"] > 12 * ROW_BYTES
    found = client.read("rows")
    check(found)
    assert found["uid"].to_pylist() == [*names("a", 12), *names("b", 12)]


def test_a_storage_server_spills_to_its_disk(stage, tmp_path):
    """Old values leave its memory and come back from the disk with the same bytes."""
    client = stage.client()
    client.create_table(spec())
    stage.storage("--spill-dir", str(tmp_path), "--memory-bytes", str(2 * ROW_BYTES))
    for tag in "abc":
        client.put("rows", rows(*names(tag, 12)))
    assert list(tmp_path.glob("flight-*"))
    check(client.read("rows"))


def test_a_storage_server_outlives_its_coordinator():
    """A coordinator that is started anew finds it empty, without anybody touching it."""
    with ExitStack() as stack:
        uri, coordinator = stack.enter_context(queue_server())
        location, _ = stack.enter_context(storage_server(uri))
        client = stack.enter_context(QueueClient(uri, identity="test", deadline_s=DEADLINE_S))
        client.create_table(spec())
        client.put("rows", rows(*names("a", 12)))
        assert rows_at(client) == {location: 12}
        coordinator.kill()
        coordinator.wait()
        stack.enter_context(queue_server("--port", uri.rpartition(":")[2]))
        until(lambda: list(rows_at(client)) == [location])
        client.create_table(spec())
        client.put("rows", rows(*names("b", 12)))
        assert rows_at(client) == {location: 12}
        check(client.read("rows"))
