"""A queue server in its own process, asked by our client, by plain pyarrow, and by nonsense."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.flight as paflight
import pytest

from flight.client import QueueClient
from flight.errors import (
    DeadlineExceededError,
    FlightQueueError,
    InvalidRequestError,
    LeaseLostError,
    SchemaMismatchError,
    TableExistsError,
    TableNotFoundError,
    TableSealedError,
    UnavailableError,
)
from flight.schema import Column, ConsumerSpec, TableSpec
from tests.kit.queues import prompts_spec, rollouts_spec
from tests.kit.server import REPOSITORY, queue_server


def rows_spec(name: str = "rows", **changes) -> TableSpec:
    """Return a table of numbers with one fifo consumer."""
    column = Column(name="x", type=pa.int64(), meaning="a number")
    return TableSpec(
        **{"name": name, "columns": (column,), "consumers": (ConsumerSpec(name="c", columns=("x",)),)}
        | changes
    )


def rows(*uids: str) -> pa.Table:
    """Return one row a uid."""
    return pa.table({"uid": list(uids), "x": pa.array(range(len(uids)), pa.int64())})


def test_training_step_crosses_the_wire(client):
    """Prompts to rollouts to training to recording, with one version announced."""
    client.create_table(prompts_spec())
    client.create_table(rollouts_spec())
    client.put("prompts", pa.table({"uid": ["p0", "p1", "p2"], "text": ["a", "b", "c"]}), writer="preprocess")
    prompts = client.take("prompts", "rollout", max_rows=8, policy_version=0)
    assert (prompts.status, prompts.policy_version) == ("rows", 0)
    assert prompts.table.column("text").to_pylist() == ["a", "b"]
    for uid in prompts.table.column("uid").to_pylist():
        answers = {
            "uid": [f"{uid}/0", f"{uid}/1"],
            "group_id": [uid, uid],
            "policy_version_start": pa.array([0, 0], pa.int64()),
            "completion_token_ids": pa.array([[1, 2], [3]], pa.list_(pa.int32())),
        }
        assert client.put("rollouts", pa.record_batch(answers), writer="rollout").num_rows == 2
    assert client.ack("prompts", "rollout", lease_id=prompts.lease_id) == 2
    batch = client.take("rollouts", "actor", max_rows=4, min_rows=4, policy_version=0)
    assert batch.table.column("completion_token_ids").to_pylist() == [[1, 2], [3], [1, 2], [3]]
    part = pa.table({"uid": batch.table.column("uid"), "advantage": pa.array([0.5] * 4, pa.float32())})
    client.put("rollouts", part, writer="actor")
    assert client.ack("rollouts", "actor", lease_id=batch.lease_id, step=1) == 4
    assert client.ack("rollouts", "actor", lease_id=batch.lease_id, step=1) == 4
    assert client.ack("prompts", "actor", uids=["p0", "p1"]) == 2
    assert client.take("prompts", "rollout", max_rows=1, policy_version=0, deadline_s=0.0).status == "empty"
    client.announce("rollouts", 1)
    told = client.take("prompts", "rollout", max_rows=1, policy_version=0)
    assert (told.status, told.policy_version, told.table.num_rows) == ("outdated", 1, 0)
    record = client.take(
        "rollouts", "recorder", max_rows=9, columns=["completion_token_ids", "advantage", "media"]
    )
    assert record.table.column("advantage").to_pylist() == [0.5] * 4
    client.ack("rollouts", "recorder", lease_id=record.lease_id)
    stats = client.stats()
    assert (stats["prompts"]["rows"], stats["rollouts"]["rows"], stats["rollouts"]["bytes"]) == (1, 0, 0)
    client.seal("rollouts")
    assert client.take("rollouts", "recorder", max_rows=1).status == "sealed"


def test_tables_are_created_described_and_dropped(client):
    """A second creation of the same table is harmless, of another one it is not."""
    client.create_table(rollouts_spec())
    client.create_table(rollouts_spec())
    assert client.describe("rollouts") == rollouts_spec()
    with pytest.raises(TableExistsError) as caught:
        client.create_table(rollouts_spec(1))
    assert str(caught.value) == (
        "server: table 'rollouts' must be new or the same as it is, got one that differs in ['staleness']; "
        "drop it first or take another name"
    )
    client.drop_table("rollouts")
    with pytest.raises(TableNotFoundError, match="table must be one of \\[\\], got 'rollouts'"):
        client.stats("rollouts")


def test_every_error_comes_back_typed(client):
    """The class, the whole message, and nothing of the server's insides."""
    client.create_table(rows_spec(capacity_rows=2))
    with pytest.raises(SchemaMismatchError) as caught:
        client.put("rows", pa.table({"uid": ["a"], "x": ["one"]}))
    assert str(caught.value) == (
        "put into rows: batch must fit the table, got 1 difference(s): column 'x': expected int64, got string"
    )
    with pytest.raises(LeaseLostError):
        client.ack("rows", "c", lease_id="never")
    with pytest.raises(InvalidRequestError, match="consumer must be one of \\['c'\\], got 'd'"):
        client.take("rows", "d", max_rows=1)
    client.put("rows", rows("a", "b"))
    with pytest.raises(DeadlineExceededError, match="consumer 'c' is furthest behind with 2 rows to finish"):
        client.put("rows", rows("z"), deadline_s=0.1)
    client.seal("rows")
    with pytest.raises(TableSealedError):
        client.put("rows", rows("late"))
    with pytest.raises(InvalidRequestError, match="deadline_s must be from 0 to 3600, got -1"):
        client.take("rows", "c", max_rows=1, deadline_s=-1)


def test_large_rows_travel_in_cut_batches(client, uri):
    """16 MB in one call: several batches on the wire, one result, the same values."""
    column = Column(name="pixels", type=pa.list_(pa.uint8()), meaning="pixels", shape="[num_bytes]")
    client.create_table(
        TableSpec(name="media", columns=(column,), consumers=(ConsumerSpec(name="c", columns=("pixels",)),))
    )
    values = np.random.default_rng(0).integers(0, 256, 16 << 20, dtype=np.uint8)
    offsets = pa.array(np.arange(0, len(values) + 1, 1 << 18), pa.int32())
    table = pa.table(
        {
            "uid": [f"m{index}" for index in range(64)],
            "pixels": pa.ListArray.from_arrays(offsets, pa.array(values)),
        }
    )
    with QueueClient(uri, identity="test", deadline_s=10.0, shared_memory=False) as wire:
        result = wire.put("media", table)
        assert result.row_ids == tuple(range(64))
        lease = wire.take("media", "c", max_rows=64)
    assert lease.table.column("pixels").num_chunks > 4
    assert lease.table.column("pixels").combine_chunks().equals(table.column("pixels").combine_chunks())
    assert client.read("media", uids=["m63"]).column("pixels").to_pylist() == [table["pixels"][63].as_py()]


def test_plain_flight_client_lists_describes_puts_and_reads(client, uri):
    """Nothing but pyarrow: the table's path is the descriptor, the endpoint's ticket reads the rows."""
    client.create_table(rows_spec())
    plain = paflight.connect(uri)
    descriptor = paflight.FlightDescriptor.for_path("rows")
    writer, reader = plain.do_put(descriptor, rows("a").schema)
    writer.write_table(rows("a", "b", "a2"))
    writer.done_writing()
    assert json.loads(reader.read().to_pybytes()) == {
        "num_rows": 3,
        "num_duplicates": 0,
        "row_ids": [0, 1, 2],
    }
    writer.close()
    info = plain.get_flight_info(descriptor)
    assert (info.total_records, info.schema.names) == (3, ["row_id", "uid", "group_id", "x"])
    assert info.schema.field("x").metadata[b"meaning"] == b"a number"
    assert plain.get_schema(descriptor).schema.equals(info.schema)
    assert [each.descriptor.path for each in plain.list_flights()] == [[b"rows"]]
    batches = [chunk.data for chunk in plain.do_get(info.endpoints[0].ticket)]
    assert pa.Table.from_batches(batches).column("uid").to_pylist() == ["a", "b", "a2"]
    assert {action.type for action in plain.list_actions()} >= {"ack", "create_table", "stats"}
    plain.close()


NONSENSE = [
    ("ticket", b""),
    ("ticket", b"\x00\xff" * 50),
    ("ticket", b'{"verb":"take","table":"rows","consumer":"c","max_rows":-5}'),
    ("ticket", b'{"verb":"take","table":"rows","consumer":"c","max_rows":5,"lease_s":1e999}'),
    ("ticket", b'{"verb":"read","table":"rows","columns":["nope"]}'),
    ("ticket", b'{"verb":"read","table":"rows","max_rows":-1}'),
    ("ticket", b'{"verb":"read","table":"\\u0000"}'),
    ("no_such_action", b"{}"),
    ("ack", b"[]"),
    ("ack", b'{"table":"rows","consumer":"c","lease_id":1}'),
    ("nack", b'{"table":"rows","consumer":"c"}'),
    ("create_table", b'{"table":"t","arrow_schema":"AAAA","consumers":[]}'),
    ("create_table", b'{"table":"t","arrow_schema":"!","consumers":[]}'),
    ("renew", b'{"table":"rows","consumer":"c","lease_id":"x","lease_s":0}'),
    ("set_max_staleness", b'{"table":"rows","max_staleness":1}'),
    ("announce", b'{"table":"rows","policy_version":1}'),
    ("stats", b'{"v":99}'),
]


@pytest.mark.parametrize(("where", "body"), NONSENSE)
def test_nonsense_is_answered_and_harms_nobody(client, uri, where, body):
    """An error with a code, no traceback, no change, and the server goes on."""
    client.create_table(rows_spec())
    client.put("rows", rows("a"))
    before = client.stats()
    plain = paflight.connect(uri)
    with pytest.raises(paflight.FlightServerError) as caught:
        list(plain.do_get(paflight.Ticket(body)) if where == "ticket" else plain.do_action((where, body)))
    detail = json.loads(caught.value.extra_info)
    assert detail["code"] in ("invalid_request", "table_not_found")
    assert detail["message"] in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert ".py" not in str(caught.value)
    assert client.stats() == before
    plain.close()


@pytest.mark.parametrize(("acks", "expected"), [("each", [[0, 1], [2]]), ("last", [[0, 1, 2]])])
def test_put_is_acknowledged_by_batch_or_once(client, uri, acks, expected):
    """A stream of two batches has two acknowledgements, or one with the rows of both."""
    client.create_table(rows_spec())
    command = json.dumps({"verb": "put", "table": "rows", "acks": acks}).encode()
    with paflight.FlightClient(uri) as plain:
        writer, reader = plain.do_put(paflight.FlightDescriptor.for_command(command), rows("a").schema)
        for batch in (rows("a", "b"), rows("c")):
            writer.write_table(batch)
        writer.done_writing()
        answers = [json.loads(reader.read().to_pybytes()) for _ in expected]
        assert reader.read() is None
        writer.close()
    assert [answer["row_ids"] for answer in answers] == expected


def test_put_with_a_wrong_descriptor_is_refused(client, uri):
    """Neither a path of two names nor a command that is no message."""
    plain = paflight.connect(uri)
    for descriptor in (
        paflight.FlightDescriptor.for_path("a", "b"),
        paflight.FlightDescriptor.for_command(b"{"),
    ):
        writer, _ = plain.do_put(descriptor, rows("a").schema)
        with pytest.raises(paflight.FlightServerError, match="descriptor"):
            writer.close()
    plain.close()


def test_lease_of_a_killed_consumer_is_delivered_again(client, uri):
    """A process takes rows and is killed; after its lease the next taker has them, as a second attempt."""
    client.create_table(rows_spec())
    client.put("rows", rows("a", "b"))
    script = (
        "import sys, time; from flight.client import QueueClient;"
        "lease = QueueClient(sys.argv[1], identity='victim').take('rows', 'c', max_rows=2, lease_s=0.8);"
        "print(lease.table.num_rows, flush=True); time.sleep(60)"
    )
    victim = subprocess.Popen(
        [sys.executable, "-c", script, uri], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert victim.stdout.readline() == "2\n"
    assert client.stats("rows")["consumers"]["c"]["leased_by"] == {"victim": 2}
    victim.kill()
    victim.communicate()
    again = client.take("rows", "c", max_rows=2, deadline_s=10.0)
    assert again.table.column("uid").to_pylist() == ["a", "b"]
    assert again.table.column("attempt").to_pylist() == [2, 2]


def test_renewed_lease_is_kept(client):
    """Renewal before the deadline: nobody else gets the rows meanwhile."""
    client.create_table(rows_spec())
    client.put("rows", rows("a"))
    lease = client.take("rows", "c", max_rows=1, lease_s=0.3)
    client.renew("rows", "c", lease.lease_id, 60.0)
    assert client.take("rows", "c", max_rows=1, deadline_s=0.6).status == "empty"
    assert client.nack("rows", "c", lease_id=lease.lease_id, reason="changed my mind") == 1
    assert client.take("rows", "c", max_rows=1).status == "rows"


def test_many_producers_and_consumers_lose_nothing(client, uri):
    """8 producers put every row twice, 6 members of two consumers take, some nack: the ledger of acks is exact."""
    both = (ConsumerSpec(name="c", columns=("x",)), ConsumerSpec(name="d", columns=("x",)))
    client.create_table(rows_spec(consumers=both, capacity_rows=150, max_attempts=1000))
    names = [[f"{producer}-{index}" for index in range(60)] for producer in range(8)]
    acked: Counter[tuple[str, str]] = Counter()
    failures: list[Exception] = []
    lock = threading.Lock()

    def produce(mine: list[str]) -> None:
        with QueueClient(uri, identity=mine[0], deadline_s=60.0) as own:
            for start in range(0, len(mine), 20):
                own.put("rows", rows(*mine[start : start + 20]))
                own.put("rows", rows(*mine[start : start + 20]))

    def consume(consumer: str, seed: int) -> None:
        chance = np.random.default_rng(seed)
        with QueueClient(uri, identity=f"{consumer}-{seed}", deadline_s=60.0) as own:
            while (lease := own.take("rows", consumer, max_rows=7)).status == "rows":
                if chance.random() < 0.2:
                    own.nack("rows", consumer, lease_id=lease.lease_id, reason="test")
                    continue
                own.ack("rows", consumer, lease_id=lease.lease_id)
                with lock:
                    acked.update((consumer, uid) for uid in lease.table.column("uid").to_pylist())

    def guarded(call, *arguments) -> threading.Thread:
        def run() -> None:
            try:
                call(*arguments)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    client.seal("rows", expected_rows=480)
    threads = [guarded(produce, mine) for mine in names]
    threads += [guarded(consume, consumer, seed) for seed, consumer in enumerate("cccddd")]
    for thread in threads:
        thread.join(60.0)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    assert acked == Counter({(consumer, uid): 1 for mine in names for uid in mine for consumer in "cd"})
    assert client.stats("rows")["rows"] == 0


def test_no_server_is_told_with_the_address():
    """Within a second or so, after a few tries."""
    with pytest.raises(UnavailableError) as caught:
        QueueClient("grpc://127.0.0.1:1", identity="test").list_tables()
    assert str(caught.value) == (
        "list_tables: a server must answer at grpc://127.0.0.1:1, got none; start one with `python -m flight serve`"
    )
    with pytest.raises(
        InvalidRequestError, match=r"uri must be like grpc://127\.0\.0\.1:8815, got 'nonsense'"
    ):
        QueueClient("nonsense", identity="test").list_tables()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_server_while_calls_wait(number, tmp_path):
    """A waiting take is answered, the process exits with 0 within five seconds, the address file is gone."""
    file = tmp_path / "queue.uri"
    with queue_server("--uri-file", str(file)) as (address, process):
        assert file.read_text().strip() == address
        with QueueClient(address, identity="test") as own:
            own.create_table(rows_spec())
            errors: list[FlightQueueError] = []

            def wait() -> None:
                try:
                    own.take("rows", "c", max_rows=1, deadline_s=60.0)
                except FlightQueueError as error:
                    errors.append(error)

            waiting = threading.Thread(target=wait, daemon=True)
            waiting.start()
            own.stats()
            started = time.monotonic()
            process.send_signal(number)
            assert process.wait(10.0) == 0
            assert time.monotonic() - started < 5.0
            waiting.join(10.0)
            assert [type(error) for error in errors] == [UnavailableError]
    assert not file.exists()


def test_server_ends_with_the_process_it_serves():
    """--parent-pid: no orphan server is left behind."""
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with queue_server("--parent-pid", str(owner.pid)) as (_, process):
        owner.kill()
        assert process.wait(10.0) == 0
    owner.communicate()


def test_client_reconnects_to_a_successor():
    """Calls that may be repeated survive a restart of the server at the same address."""
    with queue_server() as (address, process), QueueClient(address, identity="test") as own:
        own.create_table(rows_spec())
        process.kill()
        process.wait()
        with pytest.raises(UnavailableError, match=address):
            own.take("rows", "c", max_rows=1)
        with queue_server("--port", address.rpartition(":")[2]):
            assert own.list_tables() == []


def test_forked_child_is_refused_and_not_hung(client, monkeypatch):
    """Flight hangs in a forked child: the client says so instead."""
    client.ping()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(InvalidRequestError) as caught:
        client.list_tables()
    assert str(caught.value) == (
        "list_tables: the client must be used in the process that made it, got a forked one; spawn processes"
    )
    monkeypatch.undo()
