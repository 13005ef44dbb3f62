"""Rows pushed, statistics followed, SQL over live tables: a real server, real sockets, subscribers that die."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading

import pyarrow as pa
import pyarrow.flight as paflight
import pytest

from flight.client import QueueClient
from flight.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    LeaseLostError,
    TableNotFoundError,
    UnavailableError,
)
from flight.schema import Column, ConsumerSpec, TableSpec
from tests.kit.queues import rollouts_spec
from tests.kit.server import REPOSITORY, queue_server


def rows_spec(name: str = "rows", **changes) -> TableSpec:
    """Return a table of numbers, with pictures, and one fifo consumer."""
    columns = (
        Column(name="x", type=pa.int64(), meaning="a number"),
        Column(name="kind", type=pa.string(), meaning="a word", nullable=True),
        Column(name="image", type=pa.binary(), meaning="a picture", nullable=True),
    )
    return TableSpec(
        **{"name": name, "columns": columns, "consumers": (ConsumerSpec(name="c", columns=("x",)),)} | changes
    )


def rows(num_rows: int, start: int = 0, image_bytes: int = 0) -> pa.Table:
    """Return numbered rows."""
    numbers = range(start, start + num_rows)
    return pa.table(
        {
            "uid": [str(number) for number in numbers],
            "x": pa.array(numbers, pa.int64()),
            "kind": [("even", "odd")[number % 2] for number in numbers],
            "image": [bytes(image_bytes)] * num_rows,
        }
    )


# ---- subscriptions ----------------------------------------------------------------------------------------------


def test_subscriber_gets_rows_as_they_come_until_the_seal(client):
    """Pushed without asking; the iteration ends by itself when the table is sealed and empty."""
    client.create_table(rows_spec())
    seen: list[int] = []
    with client.subscribe("rows", "c", max_rows=8, columns=["x", "kind"]) as pushed:
        client.put("rows", rows(20))
        for lease in pushed:
            assert lease.table.column_names == ["row_id", "uid", "group_id", "attempt", "x", "kind"]
            assert (lease.status, lease.max_attempt) == ("rows", 1)
            seen += lease.table.column("x").to_pylist()
            assert lease.ack(step=len(seen)) == lease.table.num_rows
            assert lease.ack() == lease.table.num_rows
            if len(seen) == 20:
                client.put("rows", rows(5, start=20))
                client.seal("rows")
    assert seen == list(range(25))
    assert client.stats("rows")["rows"] == 0


def test_nacked_rows_come_again_and_expired_leases_are_refused(client):
    """The same errors as without a stream, and the stream goes on."""
    client.create_table(rows_spec())
    client.put("rows", rows(2))
    with client.subscribe("rows", "c", max_rows=2, credit_rows=4) as pushed:
        first = next(pushed)
        assert first.nack("again", uids=["0"]) == 1
        again = next(pushed)
        assert again.table.column("attempt").to_pylist() == [2]
        first.renew(0.05)
        lost = next(pushed)
        assert (lost.table.column("uid").to_pylist(), lost.max_attempt) == (["1"], 2)
        with pytest.raises(LeaseLostError):
            first.ack()
        assert (again.ack(), lost.ack()) == (1, 1)


def test_credit_bounds_what_is_leased_to_a_slow_subscriber(client):
    """Rows exactly, bytes to within a lease; an ack makes room for as much."""
    client.create_table(rows_spec())
    client.put("rows", rows(40, image_bytes=10_000))
    with client.subscribe("rows", "c", max_rows=3, credit_rows=7) as pushed:
        leases = [next(pushed) for _ in range(3)]
        assert [lease.table.num_rows for lease in leases] == [3, 3, 1]
        with pytest.raises(DeadlineExceededError) as caught:
            pushed.next_lease(deadline_s=0.2)
        assert str(caught.value) == (
            "subscription to rows by c: rows must come within the deadline, got none; 7 rows in 3 leases wait for "
            "ack or nack here, the credit is 7 rows, None bytes"
        )
        leases[0].ack()
        assert next(pushed).table.num_rows == 3
        assert client.stats("rows")["consumers"]["c"]["leased"] == 7
    assert client.stats("rows")["consumers"]["c"]["leased"] == 0
    with client.subscribe("rows", "c", max_rows=64, columns=["image"], credit_bytes=100_000) as pushed:
        sizes = [next(pushed).table.num_rows]
        while sum(sizes) < 10:
            sizes.append(next(pushed).table.num_rows)
        assert (sizes[0], sum(sizes)) == (1, 10)
        with pytest.raises(DeadlineExceededError):
            pushed.next_lease(deadline_s=0.2)
        assert client.stats("rows")["consumers"]["c"]["leased"] == 10


def test_subscription_that_cannot_be_is_refused_at_once(client):
    """Table, consumer, column, sizes and lease are named."""
    client.create_table(rows_spec())
    with pytest.raises(TableNotFoundError, match="got 'nope'"):
        client.subscribe("nope", "c")
    with pytest.raises(InvalidRequestError, match="consumer must be one of \\['c'\\], got 'd'"):
        client.subscribe("rows", "d")
    with pytest.raises(InvalidRequestError, match="columns must be among"):
        client.subscribe("rows", "c", columns=["nope"])
    with pytest.raises(InvalidRequestError, match="lease_s must be over 0 and at most a day, got 0"):
        client.subscribe("rows", "c", lease_s=0)
    with pytest.raises(InvalidRequestError, match=r"heartbeat_s must be from 0\.1 to 60, got 1000"):
        client.subscribe("rows", "c", heartbeat_s=1000)
    with pytest.raises(InvalidRequestError, match="max_rows must be at least min_rows"):
        client.subscribe("rows", "c", max_rows=0)


def test_staleness_consumer_gets_whole_groups_pushed_with_their_age(client):
    """The columns that a take computes come here too, and the version trained for can change on the way."""
    client.create_table(rollouts_spec(1))
    answers = {
        "uid": ["a0", "a1", "b0", "b1"],
        "group_id": ["a", "a", "b", "b"],
        "policy_version_start": pa.array([0] * 4, pa.int64()),
        "completion_token_ids": pa.array([[1], [2], [3], [4]], pa.list_(pa.int32())),
    }
    with client.subscribe("rollouts", "actor", max_rows=3, policy_version=0, credit_rows=2) as pushed:
        client.put("rollouts", pa.table(answers), writer="rollout")
        first = next(pushed)
        assert (first.table["uid"].to_pylist(), first.table["staleness"].to_pylist()) == (
            ["a0", "a1"],
            [0, 0],
        )
        assert (first.max_staleness, first.staleness_policy) == (1, "pace")
        client.announce("rollouts", 1)
        pushed.adopt(1)
        first.ack()
        second = next(pushed)
        assert (second.policy_version, second.table["staleness"].to_pylist()) == (1, [1, 1])
        second.ack()


def test_subscriber_learns_that_its_table_is_gone(client):
    """As an error message on the stream, of the class that any call gets."""
    client.create_table(rows_spec())
    with client.subscribe("rows", "c") as pushed:
        client.drop_table("rows")
        with pytest.raises(TableNotFoundError, match="table must be one of"):
            next(pushed)


VICTIM = """
import sys, time
from flight.client import QueueClient
pushed = QueueClient(sys.argv[1], identity="victim").subscribe("rows", "c", max_rows=2, lease_s=600.0, heartbeat_s=0.2)
print(next(pushed).table.num_rows, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_leases_of_a_dead_or_stopped_subscriber_go_back_before_they_expire(client, uri, number):
    """Killed: its stream ends. Stopped: its heartbeats are missed, though its connection stands."""
    client.create_table(rows_spec())
    client.put("rows", rows(2))
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, uri], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    try:
        assert victim.stdout.readline() == "2\n"
        assert client.stats("rows")["consumers"]["c"]["leased_by"] == {"victim": 2}
        victim.send_signal(number)
        again = client.take("rows", "c", max_rows=2, deadline_s=10.0)
        assert again.table.column("attempt").to_pylist() == [2, 2]
    finally:
        victim.kill()
        victim.communicate()


def test_many_subscribers_and_producers_lose_nothing(client, uri):
    """4 producers, 4 subscribers of which some leave and come again: every row is acked once."""
    client.create_table(rows_spec(capacity_rows=100, max_attempts=1000))
    acked: list[str] = []
    failures: list[Exception] = []
    lock = threading.Lock()

    def produce(start: int) -> None:
        with QueueClient(uri, identity=f"producer-{start}", deadline_s=30.0) as own:
            for offset in range(0, 100, 10):
                own.put("rows", rows(10, start=start + offset))

    def consume(patience: int) -> None:
        with QueueClient(uri, identity=f"subscriber-{patience}", deadline_s=30.0) as own:
            is_over = False
            while not is_over:
                with own.subscribe("rows", "c", max_rows=5) as pushed:
                    for lease in itertools.islice(pushed, patience):
                        lease.ack()
                        with lock:
                            acked.extend(lease.table.column("uid").to_pylist())
                    is_over = pushed.is_sealed

    def guarded(call, argument: int) -> threading.Thread:
        def run() -> None:
            try:
                call(argument)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    client.seal("rows", expected_rows=400)
    threads = [guarded(produce, start) for start in (0, 100, 200, 300)]
    threads += [guarded(consume, patience) for patience in (3, 7, 1000, 1000)]
    for thread in threads:
        thread.join(60.0)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(map(int, acked)) == list(range(400))


def test_plain_flight_client_subscribes_with_json_alone(client, uri):
    """The protocol needs nothing of ours; what is no message ends the stream with an error and gives rows back."""
    client.create_table(rows_spec())
    client.put("rows", rows(1))
    plain = paflight.connect(uri)
    command = {"verb": "subscribe", "table": "rows", "consumer": "c", "max_rows": 4, "credit_rows": 4}
    writer, reader = plain.do_exchange(paflight.FlightDescriptor.for_command(json.dumps(command).encode()))
    opened, pushed = reader.read_chunk(), reader.read_chunk()
    assert json.loads(opened.app_metadata.to_pybytes()) == {"type": "opened", "v": 1, "heartbeat_s": 5.0}
    assert json.loads(pushed.app_metadata.to_pybytes())["num_rows"] == pushed.data.num_rows == 1
    writer.write_metadata(b'{"type":"ack","seq":1}')
    with pytest.raises(
        paflight.FlightServerError, match="subscription message: must be a JSON message"
    ) as caught:
        reader.read_chunk()
    assert json.loads(caught.value.extra_info)["code"] == "invalid_request"
    assert client.stats("rows")["consumers"]["c"]["ready"] == 1
    plain.close()


def test_subscribers_are_told_when_the_server_stops():
    """Within the grace time, as unavailable, and the server ends."""
    with queue_server() as (address, process), QueueClient(address, identity="test") as own:
        own.create_table(rows_spec())
        with own.subscribe("rows", "c") as pushed:
            process.terminate()
            with pytest.raises(UnavailableError):
                next(pushed)
        assert process.wait(10.0) == 0


# ---- looking ----------------------------------------------------------------------------------------------------


def test_read_takes_a_range_and_a_filter(client):
    """The limit counts what matches; refusals name what is wrong."""
    client.create_table(rows_spec())
    client.put("rows", rows(20))
    odd = {"column": "kind", "op": "=", "value": "odd"}
    assert client.read("rows", row_ids=(3, 5), columns=["x"])["x"].to_pylist() == [3, 4, 5]
    assert client.read("rows", row_ids=(None, 2), newest=True, max_rows=1)["row_id"].to_pylist() == [2]
    assert client.read("rows", filter=odd, max_rows=3, columns=["x"])["x"].to_pylist() == [1, 3, 5]
    found = client.read("rows", filter={"not": odd}, row_ids=(10, None), max_rows=2, newest=True)
    assert found["x"].to_pylist() == [16, 18]
    assert client.read("rows", filter=odd, uids=["4", "3", "1"])["uid"].to_pylist() == ["3", "1"]
    with pytest.raises(InvalidRequestError, match=r"read rows: filter: column must be one of .* got 'y'"):
        client.read("rows", filter={"column": "y", "op": "=", "value": 1})


def test_watch_sends_ticks_until_it_is_closed(client):
    """At once, and then as often as asked; one dictionary a table."""
    client.create_table(rows_spec())
    client.create_table(rows_spec("other"))
    ticks = client.watch(interval_s=0.1)
    first, second = next(ticks), next(ticks)
    assert (first["table"], second["table"]) == ("other", "rows")
    assert first["time"] == second["time"]
    client.put("rows", rows(10))
    client.take("rows", "c", max_rows=4)
    seen = next(tick for tick in ticks if tick["rows"] == 10 and tick["consumers"][0]["leased"] == 4)
    assert seen["consumers"][0]["ready"] == 6
    ticks.close()
    assert len({tick["time"] for tick in client.watch(interval_s=0.1, tables=["rows"], deadline_s=0.35)}) >= 3
    with pytest.raises(TableNotFoundError):
        next(client.watch(tables=["nope"]))
    with pytest.raises(InvalidRequestError, match=r"watch: interval_s must be from 0\.1 to 60, got 0"):
        next(client.watch(interval_s=0))


def test_sql_answers_over_live_tables_and_consumes_nothing(client):
    """Aggregates, joins and nested values; leased rows are there too."""
    pytest.importorskip("duckdb")
    client.create_table(rows_spec())
    client.create_table(rows_spec("other"))
    client.put("rows", rows(10))
    client.put("other", rows(5))
    client.take("rows", "c", max_rows=3)
    found = client.sql("SELECT kind, avg(x) AS mean, count(*) AS n FROM rows GROUP BY kind ORDER BY kind")
    assert found.to_pydict() == {"kind": ["even", "odd"], "mean": [4.0, 5.0], "n": [5, 5]}
    found = client.sql(
        "WITH few AS (SELECT uid FROM other WHERE x > 2) SELECT rows.x FROM rows JOIN few USING (uid) ORDER BY 1"
    )
    assert found["x"].to_pylist() == [3, 4]
    assert client.stats("rows")["rows"] == 10


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("DROP TABLE rows", "query must be one SELECT"),
        ("SELECT 1; SELECT 2", "query must be one SELECT, got 2 statements"),
        ("SELECT * FROM nope", "table must be one of ['rows'], got 'nope'"),
        ("SELECT * FROM '/etc/passwd'", "table must be one of ['rows'], got '/etc/passwd'"),
        ("SELECT * FROM read_text('/etc/passwd')", "table function must be one of"),
        ("SELECT nope FROM rows", 'Referenced column "nope" not found'),
        ("SELECT * FROM range(1000000)", "answer must be at most max_rows 100000 rows"),
        (
            "SELECT sum(a.i * b.i * c.i) FROM range(9999999) a(i), range(99999) b(i), range(9999) c(i)",
            "come within",
        ),
    ],
)
def test_sql_that_is_no_harmless_select_is_refused(client, query, message):
    """Each refusal says the rule, and the server goes on."""
    pytest.importorskip("duckdb")
    client.create_table(rows_spec())
    with pytest.raises((InvalidRequestError, DeadlineExceededError)) as caught:
        client.sql(query, deadline_s=3.0)
    assert message in str(caught.value)
    assert client.list_tables() == ["rows"]
