"""Rows in shared memory: the same bytes as over the socket, held as long as a view is alive, freed whatever happens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as paflight
import pytest
import structlog

from flight import messages as m
from flight.broker import Broker
from flight.client import QueueClient
from flight.errors import UnavailableError
from flight.schema import Column, ConsumerSpec, TableSpec
from flight.server import QueueServer
from tests.kit.columns import columns, digest
from tests.kit.pixels import DEADLINE_S, ROW_BYTES, pixels, until
from tests.kit.server import REPOSITORY, queue_server

# Arrow cannot take from views, so the server cannot gather them from several batches.
COLUMNS = {name: array for name, array in columns().items() if name != "string_view"}


def spec_of(name: str, **types: pa.DataType) -> TableSpec:
    """Return a table with these columns and one consumer of all."""
    found = tuple(
        Column(name=each, type=kind, meaning="a value", nullable=True) for each, kind in types.items()
    )
    return TableSpec(name=name, columns=found, consumers=(ConsumerSpec(name="c", columns=tuple(types)),))


PIXELS = spec_of("rows", x=pa.list_(pa.uint8()))


def state(client: QueueClient) -> m.SharedMemoryOffer:
    """Return what the server says about its arena."""
    return m.decode(_raw(client, "shared_memory"), m.SharedMemoryOffer, what="offer")


def _raw(client: QueueClient, action: str) -> bytes:
    with paflight.FlightClient(client.uri) as plain:
        [answer] = plain.do_action(paflight.Action(action, b"{}"), paflight.FlightCallOptions(timeout=10))
        return answer.body.to_pybytes()


@pytest.fixture(scope="module")
def server():
    """A server with 32 MiB of shared memory, and what it has logged."""
    with queue_server("--shared-memory-bytes", str(32 << 20)) as (uri, process):
        yield uri, process


@pytest.fixture
def client(server):
    """A client of a server without tables or slots."""
    with QueueClient(server[0], identity="test", deadline_s=DEADLINE_S) as connected:
        for name in connected.list_tables():
            connected.drop_table(name)
        until(lambda: state(connected).used_bytes == 0)
        yield connected


def test_every_type_arrives_with_the_same_bytes_over_both_paths(client, server):
    """Put over one path and taken over the other, in all four combinations, whole and in parts."""
    schema = {name: array.type for name, array in COLUMNS.items()}
    rows = pa.table(COLUMNS)
    expected = {name: digest(rows[name]) for name in COLUMNS}
    part = {name: digest(rows[name].slice(3, 5)) for name in COLUMNS}
    with QueueClient(server[0], identity="plain", deadline_s=DEADLINE_S, shared_memory=False) as plain:
        paths = [(client, client), (client, plain), (plain, client), (plain, plain)]
        for number, (writer, reader) in enumerate(paths):
            name = f"types_{number}"
            client.create_table(spec_of(name, **schema))
            uids = pa.array([f"{row}" for row in range(rows.num_rows)])
            writer.put(name, rows.append_column("uid", uids))
            lease = reader.take(name, "c", max_rows=rows.num_rows)
            lease.table.validate(full=True)
            assert {each: digest(lease.table[each]) for each in COLUMNS} == expected
            some = reader.read(name, row_ids=(3, 7))
            assert {each: digest(some[each]) for each in COLUMNS} == part
            assert lease.table.schema.field("tensor") == reader.read(name, max_rows=0).schema.field("tensor")
            assert reader.read(name, uids=["9", "2"]).column("uid").to_pylist() == ["9", "2"]
            shuffled = reader.read(name, uids=["9", "2", "5"])
            assert digest(shuffled["list_int32"]) == digest(rows["list_int32"].take([9, 2, 5]))
            client.ack(name, "c", lease_id=lease.lease_id)
            assert client.stats(name)["bytes"] == 0


def test_rows_lie_in_the_arena_and_are_not_copied(client):
    """Put writes a slot of 16 MB or less; any number of readers look at the same slots."""
    client.create_table(PIXELS)
    rows = pixels(16)
    client.put("rows", rows)
    put = state(client)
    assert put.num_slots == 1
    lease = client.take("rows", "c", max_rows=16)
    looked = client.read("rows")
    assert state(client).used_bytes == put.used_bytes
    assert digest(lease.table["x"]) == digest(looked["x"]) == digest(rows["x"])


def test_tables_of_many_pieces_are_put_into_few_slots(client):
    """Crumbs are joined, large pieces are not; a table of too many large ones goes over the socket."""
    client.create_table(PIXELS)
    rows = pixels(24)
    crumbs = pa.concat_tables([rows.slice(row, 1) for row in range(24)])
    assert client.put("rows", crumbs).num_rows == 24
    assert 1 <= state(client).num_slots <= 24
    assert digest(client.read("rows")["x"]) == digest(rows["x"])
    client.create_table(spec_of("words", text=pa.string()))
    texts = pa.table({"uid": [f"{row}" for row in range(2000)], "text": ["x" * 100] * 2000})
    before = state(client).num_slots
    client.put("words", pa.concat_tables([texts.slice(row, 1) for row in range(2000)]))
    assert state(client).num_slots == before + 1
    assert digest(client.take("words", "c", max_rows=2000).table["text"]) == digest(texts["text"])


def test_views_hold_their_slots_until_the_last_one_is_gone(client):
    """Neither the end of the lease, nor of the table, nor of the client takes memory from a view."""
    torch = pytest.importorskip("torch")
    client.create_table(PIXELS)
    rows = pixels(4, seed=3)
    client.put("rows", rows)
    with QueueClient(client.uri, identity="reader", deadline_s=DEADLINE_S) as reader:
        lease = reader.take("rows", "c", max_rows=4)
        array = lease.table["x"].chunk(0).values.to_numpy()
        tensor = torch.from_dlpack(lease.table["x"].chunk(0).values)
        expected = array.copy()
        reader.ack("rows", "c", lease_id=lease.lease_id)
        del lease
    assert not array.flags.writeable
    client.drop_table("rows")
    assert state(client).used_bytes > 0
    # Whoever writes now must not get the bytes that are looked at.
    client.create_table(PIXELS)
    client.put("rows", pixels(8, seed=4))
    assert np.array_equal(array, expected)
    client.drop_table("rows")
    del array
    assert state(client).used_bytes > 0
    assert np.array_equal(tensor.numpy(), expected)
    del tensor
    until(lambda: state(client).used_bytes == 0)


def test_slots_of_a_client_that_is_killed_are_freed(client):
    """Its socket closes, however it ends."""
    client.create_table(PIXELS)
    client.put("rows", pixels(8))
    clients = state(client).num_clients
    holder = subprocess.Popen(
        [sys.executable, "-m", "tests.kit.shared_holder", client.uri],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
    )  # fmt: skip
    assert holder.stdout.readline() == "holding 8\n"
    client.drop_table("rows")
    held = state(client)
    assert (held.num_clients, held.used_bytes > 8 * ROW_BYTES) == (clients + 1, True)
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=DEADLINE_S)
    until(lambda: (state(client).num_clients, state(client).used_bytes) == (clients, 0))


def test_views_stay_valid_when_the_server_is_killed():
    """Calls raise UnavailableError; a successor is joined anew and removes what was left behind."""
    with queue_server() as (uri, process), QueueClient(uri, identity="test", deadline_s=5.0) as client:
        client.create_table(PIXELS)
        rows = pixels(4)
        client.put("rows", rows)
        lease = client.take("rows", "c", max_rows=4)
        left_behind = Path(state(client).socket_path).parent
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
        with pytest.raises(UnavailableError):
            client.put("rows", rows)
        with pytest.raises(UnavailableError):
            client.take("rows", "c", max_rows=1)
        assert digest(lease.table["x"]) == digest(rows["x"])
        with queue_server("--port", uri.rpartition(":")[2]):
            assert not left_behind.exists()
            client.create_table(PIXELS)
            client.put("rows", pixels(4, seed=1))
            again = client.take("rows", "c", max_rows=4)
            assert state(client).num_slots > 0
            assert digest(again.table["x"]) == digest(pixels(4, seed=1)["x"])
            assert digest(lease.table["x"]) == digest(rows["x"])


def test_full_arena_falls_back_to_the_socket_with_one_warning():
    """On both sides, for puts and for takes that need a copy."""
    with (
        queue_server("--shared-memory-bytes", str(1 << 20)) as (uri, _),
        QueueClient(uri, identity="test", deadline_s=DEADLINE_S) as client,
        structlog.testing.capture_logs() as logs,
    ):
        client.create_table(PIXELS)
        rows = pixels(8)
        for seed in range(3):
            assert client.put("rows", pixels(8, seed=seed)).num_rows == 8
        assert [entry["log_level"] for entry in logs] == ["warning"]
        assert logs[0]["event"].startswith("shared memory is full, rows go over the socket;")
        lease = client.take("rows", "c", max_rows=8)
        assert digest(lease.table["x"]) == digest(rows["x"])
        assert client.read("rows").num_rows == 24
        assert state(client).used_bytes == 0
        assert client.put("rows", pixels(2, seed=9)).num_rows == 2
        assert state(client).used_bytes > 0


def test_server_warns_once_that_memory_is_full(tmp_path):
    """However many takes find no room."""
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "flight", "serve", "--port", "0", "--shared-memory-bytes", str(1 << 20)],
            stdout=subprocess.PIPE, stderr=errors, text=True, cwd=REPOSITORY,
        )  # fmt: skip
    try:
        uri = process.stdout.readline().removeprefix("listening on ").strip()
        with QueueClient(uri, identity="test", deadline_s=DEADLINE_S) as client:
            client.create_table(PIXELS)
            client.put("rows", pixels(8))
            for _ in range(3):
                assert client.read("rows").num_rows == 8
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)
    assert len(re.findall("shared memory is full, rows go over the socket", log.read_text())) == 1


@pytest.mark.parametrize("where", ["server", "client"])
def test_shared_memory_can_be_turned_off_on_either_side(where):
    """Nothing is shared, and nothing is missed."""
    options = ["--no-shared-memory"] if where == "server" else []
    with (
        queue_server(*options) as (uri, _),
        QueueClient(uri, identity="test", deadline_s=DEADLINE_S, shared_memory=where == "server") as client,
    ):
        client.create_table(PIXELS)
        client.put("rows", pixels(4))
        assert digest(client.take("rows", "c", max_rows=4).table["x"]) == digest(pixels(4)["x"])
        if where == "server":
            assert _raw(client, "shared_memory") == b"null"
        else:
            assert (state(client).num_clients, state(client).num_slots) == (0, 0)


def test_host_that_gives_no_memory_serves_without(tmp_path):
    """A directory that others may enter is refused with one warning."""
    (tmp_path / f"flight-shared-{os.geteuid()}").mkdir(mode=0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "flight", "serve", "--port", "0"], env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
    )  # fmt: skip
    uri = process.stdout.readline().removeprefix("listening on ").strip()
    with QueueClient(uri, identity="test", deadline_s=DEADLINE_S) as client:
        client.create_table(PIXELS)
        assert client.put("rows", pixels(4)).num_rows == 4
        assert _raw(client, "shared_memory") == b"null"
    process.terminate()
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert "must be a directory of this user alone (0700); remove it" in errors


def test_threads_that_put_and_take_at_once_see_their_own_bytes(client):
    """Slots are used again and again, and no reader sees another's."""
    client.create_table(PIXELS)
    wrong: list[str] = []

    def run(number: int) -> None:
        for turn in range(5):
            seed = 100 * number + turn
            rows = pixels(3, seed=seed)
            client.put("rows", rows)
            found = client.read("rows", uids=rows["uid"].to_pylist())
            # Some may have been taken and acked by then.
            expected = dict(zip(rows["uid"].to_pylist(), rows["x"], strict=True))
            for uid, values in zip(found["uid"].to_pylist(), found["x"], strict=True):
                if digest(values.values) != digest(expected[uid].values):
                    wrong.append(uid)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(4 * 5):
        lease = client.take("rows", "c", max_rows=3, min_rows=3)
        for uid, values in zip(lease.table["uid"].to_pylist(), lease.table["x"], strict=True):
            seed, row = map(int, uid.split("-"))
            if digest(values.values) != digest(pixels(3, seed=seed)["x"][row].values):
                wrong.append(uid)
        client.ack("rows", "c", lease_id=lease.lease_id)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert wrong == []


def test_server_in_this_process_without_shared_memory_says_so():
    """`put_shared` is refused in words."""
    server = QueueServer("grpc://127.0.0.1:0", Broker())
    try:
        with paflight.FlightClient(f"grpc://127.0.0.1:{server.port}") as plain:
            body = b'{"table": "rows", "connection": "", "slots": [1]}'
            with pytest.raises(paflight.FlightServerError, match="the server must have shared memory"):
                list(plain.do_action(paflight.Action("put_shared", body)))
    finally:
        server.stop(1.0)
        server.shutdown()


def test_rows_that_move_to_disk_leave_the_arena(tmp_path):
    """A table that spills keeps no slots for what is on disk, and returns it all the same."""
    with (
        queue_server("--spill-dir", str(tmp_path)) as (uri, _),
        QueueClient(uri, identity="test", deadline_s=DEADLINE_S) as client,
    ):
        column = Column(name="x", type=pa.list_(pa.uint8()), meaning="a value")
        consumers = (ConsumerSpec(name="c", columns=("x",)),)
        client.create_table(
            TableSpec(name="rows", columns=(column,), consumers=consumers, spill=True, memory_bytes=1 << 20)
        )
        rows = pixels(12)
        for start in range(0, 12, 2):
            client.put("rows", rows.slice(start, 2))
        until(lambda: state(client).used_bytes < 2 << 20)
        assert client.stats("rows")["disk_bytes"] > 0
        assert digest(client.take("rows", "c", max_rows=12).table["x"]) == digest(rows["x"])


def test_rows_outlive_the_half_of_their_slot_that_is_finished(client):
    """What is left of a slot is copied out once most of it is finished, and the slot is freed."""
    client.create_table(PIXELS)
    rows = pixels(8)
    client.put("rows", rows)
    for start, num_slots in ((0, 1), (2, 1), (4, 0), (6, 0)):
        lease = client.take("rows", "c", max_rows=2)
        assert digest(lease.table["x"]) == digest(rows["x"].slice(start, 2))
        client.ack("rows", "c", lease_id=lease.lease_id)
        del lease
        until(lambda at_most=num_slots: state(client).num_slots <= at_most)
