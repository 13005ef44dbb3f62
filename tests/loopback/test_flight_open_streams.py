"""Puts and takes over open streams: the same as by calls, whatever breaks. A real server, real sockets."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa
import pytest

from flight.broker import Broker
from flight.client import QueueClient
from flight.errors import (
    CapacityError,
    DeadlineExceededError,
    InvalidRequestError,
    LeaseLostError,
    SchemaMismatchError,
    TableNotFoundError,
    TableSealedError,
    UnavailableError,
)
from flight.schema import Column, ConsumerSpec, TableSpec
from flight.server import QueueServer
from tests.kit.columns import columns, digest
from tests.kit.queues import rollouts_spec
from tests.kit.relay import Relay
from tests.kit.server import queue_server

# Arrow cannot take from views, so the server cannot gather them from several batches.
COLUMNS = {name: array for name, array in columns().items() if name != "string_view"}
READER = (ConsumerSpec(name="c", columns=("x",)),)


def rows_spec(name: str = "rows", **changes) -> TableSpec:
    """Return a table of numbers and pictures with one consumer."""
    found = (
        Column(name="x", type=pa.int64(), meaning="a number"),
        Column(name="image", type=pa.binary(), meaning="a picture", nullable=True),
    )
    return TableSpec(**{"name": name, "columns": found, "consumers": READER} | changes)


def rows(num_rows: int, start: int = 0) -> pa.Table:
    """Return numbered rows without pictures."""
    numbers = range(start, start + num_rows)
    return pa.table(
        {
            "uid": pa.array([str(number) for number in numbers], pa.string()),
            "x": pa.array(numbers, pa.int64()),
        }
    )


def pictures(num_rows: int, num_bytes: int, seed: int = 0) -> pa.Table:
    """Return rows with pictures of random bytes."""
    chance = np.random.default_rng(seed)
    return rows(num_rows, start=1000 * seed).append_column(
        "image", pa.array([chance.bytes(num_bytes) for _ in range(num_rows)], pa.binary())
    )


@pytest.fixture
def relay(uri):
    """A relay in front of the server."""
    with Relay(uri) as found:
        yield found


@pytest.fixture
def remote(client, relay):
    """A client whose connections go through the relay, and a table."""
    client.create_table(rows_spec())
    with QueueClient(relay.address, identity="remote", deadline_s=20.0) as connected:
        yield connected


# ---- puts -------------------------------------------------------------------------------------------------------


def test_values_of_every_type_arrive_as_they_were_put(client):
    """Put and taken over streams, equal by hash; one row at a time and all at once."""
    spec = TableSpec(
        name="all",
        columns=tuple(Column(name=n, type=a.type, meaning="m", nullable=True) for n, a in COLUMNS.items()),
        consumers=(ConsumerSpec(name="c", columns=tuple(COLUMNS)),),
    )
    client.create_table(spec)
    num_rows = len(next(iter(COLUMNS.values())))
    source = pa.table({"uid": [str(row) for row in range(num_rows)]} | COLUMNS)
    again = source.set_column(0, "uid", pa.array([f"again-{row}" for row in range(num_rows)]))
    with client.open_put("all") as puts, client.open_take("all", "c") as takes:
        for row in range(num_rows):
            assert puts.put(source.slice(row, 1)).row_ids == (row,)
        singles = [takes.take(max_rows=1) for _ in range(num_rows)]
        assert puts.put(again.to_batches()[0]).num_rows == num_rows
        whole = takes.take(max_rows=num_rows, min_rows=num_rows, ack=singles[0])
        taken = pa.concat_tables(lease.table for lease in singles)
        for name in COLUMNS:
            assert digest(taken[name]) == digest(source[name]), name
            assert digest(whole.table[name]) == digest(source[name]), name
        assert [takes.ack(lease) for lease in singles] == [1] * num_rows
        assert takes.ack(whole) == num_rows
    assert client.stats("all")["rows"] == 0


def test_puts_on_their_way_are_answered_in_order_and_duplicates_counted(client):
    """More than may be on their way at once, in batches of all sizes, with uids that are there already."""
    client.create_table(rows_spec())
    with client.open_put("rows") as puts:
        pending = [puts.put_nowait(rows(1 + number % 7, start=10 * number)) for number in range(200)]
        large = puts.put_nowait(pictures(40, 200_000, seed=9))
        again = puts.put_nowait(pa.concat_tables([rows(1, start=30), rows(1, start=5000), rows(1, start=0)]))
        first_ids = [each.result().row_ids[0] for each in pending]
        assert first_ids == sorted(first_ids)
        assert sum(each.result().num_rows for each in pending) == sum(1 + number % 7 for number in range(200))
        assert (large.result().num_rows, large.result().num_duplicates) == (40, 0)
        assert len(set(large.result().row_ids)) == 40
        answer = again.result()
        assert (answer.num_rows, answer.num_duplicates) == (3, 2)
        assert (answer.row_ids[0], answer.row_ids[2]) == (first_ids[3], 0)
        assert puts.put(rows(0)).num_rows == 0
    found = client.read("rows", filter={"column": "x", "op": ">=", "value": 9000})
    assert digest(found["image"]) == digest(pictures(40, 200_000, seed=9)["image"])


def test_refused_puts_are_told_by_their_own_results_and_harm_no_others(client):
    """The stream goes on; the end of the block tells what no result has told."""
    client.create_table(rows_spec(capacity_bytes=1 << 20))
    wrong = pa.table({"uid": ["w"], "y": [1]})
    with client.open_put("rows") as puts:
        before = puts.put_nowait(rows(1))
        refused = puts.put_nowait(wrong)
        after = puts.put_nowait(rows(1, start=1))
        with pytest.raises(SchemaMismatchError, match="column 'y': expected one of"):
            refused.result()
        assert (before.result().num_rows, after.result().num_rows) == (1, 1)
        with pytest.raises(CapacityError):
            puts.put(pictures(2, 1 << 20, seed=1))
        assert puts.put(rows(1, start=2)).num_rows == 1
    untold = client.open_put("rows")
    untold.put_nowait(wrong)
    untold.put_nowait(rows(1, start=3))
    with pytest.raises(SchemaMismatchError):
        untold.flush()
    untold.flush()
    untold.close()
    with pytest.raises(InvalidRequestError, match="the stream must be open, got a closed one; open another"):
        untold.put(rows(1))
    client.seal("rows")
    with pytest.raises(TableSealedError), client.open_put("rows") as sealed:
        sealed.put_nowait(rows(1, start=9))
    assert client.stats("rows")["rows"] == 4


def test_put_into_a_full_table_waits_until_its_deadline_and_says_who_is_behind(client):
    """Those behind it wait too; with room, all go in."""
    client.create_table(rows_spec(capacity_rows=4))
    with client.open_put("rows") as puts, client.open_take("rows", "c") as takes:
        puts.put(rows(4))
        with pytest.raises(
            DeadlineExceededError, match="consumer 'c' is furthest behind with 4 rows to finish"
        ):
            puts.put(rows(1, start=4), deadline_s=0.1)
        waiting = [puts.put_nowait(rows(1, start=number)) for number in (5, 6)]
        takes.ack(takes.take(max_rows=2))
        assert [each.result().num_rows for each in waiting] == [1, 1]
        assert client.stats("rows")["rows"] == 4


def test_streams_to_what_is_not_there_are_refused_by_name(client):
    """Table, consumer, column; and a server that is not there."""
    client.create_table(rows_spec())
    with pytest.raises(TableNotFoundError, match="got 'nothing'"), client.open_put("nothing") as puts:
        puts.put(rows(1))
    with client.open_take("rows", "nobody") as takes, pytest.raises(InvalidRequestError, match="nobody"):
        takes.take(max_rows=1)
    with (
        client.open_take("rows", "c", columns=["y"]) as takes,
        pytest.raises(InvalidRequestError, match="'y'"),
    ):
        takes.take(max_rows=1)
    with QueueClient("grpc://127.0.0.1:9", identity="lost", deadline_s=0.5) as lost:
        with pytest.raises(UnavailableError), lost.open_put("rows") as puts:
            puts.put(rows(1))
        with pytest.raises(UnavailableError), lost.open_take("rows", "c") as takes:
            takes.take(max_rows=1)


def test_puts_survive_broken_connections(client, remote, relay):
    """What was not answered is put again; every row is there once."""
    with remote.open_put("rows") as puts:
        for start in range(0, 100, 10):
            pending = [puts.put_nowait(rows(1, start=start + number)) for number in range(10)]
            assert relay.break_all() > 0
            assert [each.result().num_rows for each in pending] == [1] * 10
    stats = client.stats("rows")
    assert stats["put"] == 100
    assert sorted(client.read("rows")["x"].to_pylist()) == list(range(100))


def test_parts_of_rows_may_change_from_put_to_put(client):
    """Another schema opens another stream."""
    client.create_table(rows_spec())
    with client.open_put("rows") as puts:
        pending = [
            puts.put_nowait(rows(1)),
            puts.put_nowait(pictures(1, 10, seed=1)),
            puts.put_nowait(rows(1, 7)),
        ]
        assert [each.result().num_rows for each in pending] == [1, 1, 1]
    assert client.read("rows")["image"].is_null().to_pylist() == [True, False, True]


def test_threads_may_share_one_stream_of_puts(client):
    """Each gets its own answers."""
    client.create_table(rows_spec())
    failures: list[Exception] = []
    with client.open_put("rows") as puts:

        def produce(start: int) -> None:
            try:
                for number in range(start, start + 25):
                    assert puts.put(rows(2, start=2 * number)).num_duplicates == 0
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=produce, args=(25 * index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
    assert failures == []
    assert client.stats("rows")["put"] == 200


# ---- takes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["call", "stream"])
def test_ack_rides_with_the_next_take(client, way):
    """Ack first, then take; a lost lease is refused and nothing is taken; the ack stands when the take fails."""
    client.create_table(rows_spec())
    client.put("rows", rows(4))
    with client.open_take("rows", "c") as stream:

        def take(**options):
            if way == "stream":
                return stream.take(**options)
            return client.take("rows", "c", **options)

        first = take(max_rows=1)
        second = take(max_rows=1, ack=first)
        assert (second.table["x"].to_pylist(), client.stats("rows")["consumers"]["c"]["acked"]) == ([1], 1)
        with pytest.raises(InvalidRequestError, match="max_rows"):
            take(max_rows=0, ack=second)
        assert client.stats("rows")["consumers"]["c"]["acked"] == 2
        short = take(max_rows=1, lease_s=0.05)
        again = take(max_rows=2, min_rows=2)
        assert again.table["uid"].to_pylist() == ["2", "3"]
        with pytest.raises(LeaseLostError):
            take(max_rows=1, ack=short)
        assert client.stats("rows")["consumers"]["c"]["leased"] == 2
        client.seal("rows")
        assert take(max_rows=1, ack=again).status == "sealed"
        assert take(max_rows=1, ack=take(max_rows=1)).status == "sealed"
    assert client.stats("rows")["rows"] == 0


def test_stream_of_takes_has_all_verbs_of_a_lease(client):
    """Parts of a lease, nack, skip, renew, the step of an ack, and an answer without rows."""
    client.create_table(rows_spec())
    client.put("rows", rows(4))
    with client.open_take("rows", "c") as takes:
        lease = takes.take(max_rows=4, lease_s=30.0)
        assert takes.ack(lease, uids=["0"], step=5) == 1
        assert takes.nack(lease, "broken", uids=["1"], requeue=False) == 1
        assert takes.nack(lease, "again", uids=["2"]) == 1
        takes.renew(lease, 60.0)
        again = takes.take(max_rows=4, ack=lease, step=6)
        assert (again.table["uid"].to_pylist(), again.table["attempt"].to_pylist()) == (["2"], [2])
        assert takes.take(max_rows=1, deadline_s=0.0).status == "empty"
        assert takes.ack(takes.take(max_rows=1, deadline_s=0.0)) == 0
        takes.renew(again, 0.05)
        assert takes.take(max_rows=1).table["uid"].to_pylist() == ["2"]
        with pytest.raises(LeaseLostError):
            takes.ack(again)
        found = client.stats("rows")["consumers"]["c"]
        assert (found["acked"], found["skipped"], found["last_step"]) == (2, 1, 6)


def test_take_waits_for_rows_and_is_woken_by_a_put(client):
    """Not by its deadline."""
    client.create_table(rows_spec())
    with client.open_take("rows", "c") as takes:
        taken: list[pa.Table] = []
        waiter = threading.Thread(target=lambda: taken.append(takes.take(max_rows=2, min_rows=2).table))
        waiter.start()
        with client.open_put("rows") as puts:
            puts.put(rows(1))
            puts.put(rows(1, start=1))
        waiter.join(20.0)
    assert taken[0]["x"].to_pylist() == [0, 1]


def test_lease_of_a_broken_stream_can_be_finished_and_expires_if_it_is_not(client, remote, relay):
    """Leases are not the stream's."""
    client.put("rows", rows(3))
    with remote.open_take("rows", "c") as takes:
        first, second = takes.take(max_rows=1), takes.take(max_rows=1, lease_s=0.2)
        assert relay.break_all() > 0
        third = takes.take(max_rows=1, ack=first)
        assert third.table["x"].to_pylist() == [2]
        assert relay.break_all() > 0
        again = takes.take(max_rows=1, ack=third)
        assert (again.table["x"].to_pylist(), again.table["attempt"].to_pylist()) == ([1], [2])
        with pytest.raises(LeaseLostError):
            takes.ack(second)
        assert takes.ack(again) == 1
    assert client.stats("rows")["rows"] == 0


def test_staleness_is_marked_and_announced_versions_are_told(client):
    """As in the answer to a call."""
    client.create_table(rollouts_spec(max_staleness=1, policy="mask"))
    client.put(
        "rollouts",
        pa.table(
            {
                "uid": ["a", "b"],
                "group_id": ["g", "g"],
                "policy_version_start": pa.array([0, 0], pa.int64()),
                "completion_token_ids": pa.array([[1, 2], [3]], pa.list_(pa.int32())),
            }
        ),
        writer="rollout",
    )
    client.announce("rollouts", 2)
    with client.open_take("rollouts", "actor") as takes:
        streamed = takes.take(max_rows=2, policy_version=2)
        takes.nack(streamed, "once more")
    called = client.take("rollouts", "actor", max_rows=2, policy_version=2)
    assert streamed.table.drop(["attempt"]).equals(called.table.drop(["attempt"]))
    assert (streamed.max_staleness, streamed.staleness_policy, streamed.policy_version) == (1, "mask", 2)
    assert (called.max_staleness, called.staleness_policy, called.policy_version) == (1, "mask", 2)


# ---- idle streams -----------------------------------------------------------------------------------------------


def test_idle_streams_rest_before_the_server_cuts_them_and_wake_when_used():
    """The server's limit is what counts, and the answers of puts nobody asked after are not lost."""
    with (
        queue_server("--put-idle-s", "0.4") as (uri, _),
        QueueClient(uri, identity="i", deadline_s=20.0) as client,
    ):
        client.create_table(rows_spec())
        with client.open_put("rows") as puts, client.open_take("rows", "c") as takes:
            for start in range(3):
                pending = puts.put_nowait(rows(1, start=start))
                lease = takes.take(max_rows=1)
                for stream in (puts._stream, takes._stream):
                    if (watcher := stream._watcher) is not None:
                        watcher.join(20.0)
                    assert not stream.is_open
                assert (pending.result().num_duplicates, pending.result().row_ids) == (0, (start,))
                assert takes.ack(lease) == 1


def test_server_with_idle_streams_stops_at_once():
    """Who says nothing has nothing in progress; the next use finds no server."""
    server = QueueServer("grpc://127.0.0.1:0", Broker(), tables=[rows_spec()])
    client = QueueClient(f"grpc://127.0.0.1:{server.port}", identity="i", deadline_s=1.0)
    with client.open_take("rows", "c") as takes:
        puts = client.open_put("rows")
        puts.put(rows(1))
        assert takes.take(max_rows=1).status == "rows"
        assert server.stop(10.0)
        with pytest.raises(UnavailableError):
            puts.put(rows(1, start=1))
        puts.close()
    client.close()
