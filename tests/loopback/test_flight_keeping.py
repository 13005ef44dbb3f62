"""Tables that change, dead letters, the end as an event, and callers that fall silent, over a real socket."""

from __future__ import annotations

import json
import threading
import time

import pyarrow as pa
import pyarrow.flight as paflight
import pytest

from flight.client import QueueClient
from flight.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    LeaseLostError,
    SchemaMismatchError,
    UnavailableError,
)
from flight.schema import Column, ConsumerSpec, TableSpec
from tests.kit.queues import prompts_spec, rollouts_spec
from tests.kit.server import queue_server


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """The address of a server that bounds all its tables, may spill, and has little patience."""
    spill = tmp_path_factory.mktemp("spill")
    options = ("--capacity-bytes", "4000000", "--spill-dir", str(spill), "--put-idle-s", "0.5")
    with queue_server(*options) as (address, _):
        yield address
    assert list(spill.iterdir()) == []


def rows_spec(name: str = "rows", **changes) -> TableSpec:
    """Return a table of strings with one fifo consumer."""
    column = Column(name="x", type=pa.string(), meaning="a text")
    consumer = ConsumerSpec(name="c", columns=("x",))
    return TableSpec(**{"name": name, "columns": (column,), "consumers": (consumer,)} | changes)


def rows(*uids: str, value: str = "text") -> pa.Table:
    """Return one row a uid."""
    return pa.table({"uid": list(uids), "x": [value] * len(uids)})


def test_table_grows_while_it_is_used(client):
    """A column and a consumer are added; rows that are there have nulls; a change of what is there is refused."""
    client.create_table(rows_spec())
    client.put("rows", rows("a", "b"))
    lease = client.take("rows", "c", max_rows=1)
    score = Column(name="score", type=pa.float32(), meaning="how good", writer="judge", nullable=True)
    spec = client.alter_table("rows", columns=[score], consumers=[ConsumerSpec(name="late", columns=("x",))])
    assert spec == client.describe("rows")
    assert spec.columns[-1] == score
    assert client.alter_table("rows", columns=[score]) == spec
    client.create_table(rows_spec())
    late = client.take("rows", "late", max_rows=9, columns=["x", "score"])
    assert late.table.column("uid").to_pylist() == ["a", "b"]
    assert late.table.column("score").to_pylist() == [None, None]
    client.put("rows", pa.table({"uid": ["b"], "score": pa.array([0.5], pa.float32())}), writer="judge")
    assert client.read("rows", uids=["b"]).column("score").to_pylist() == [0.5]
    assert client.ack("rows", "c", lease_id=lease.lease_id) == 1
    with pytest.raises(SchemaMismatchError) as caught:
        client.alter_table(
            "rows", columns=[Column(name="x", type=pa.binary(), meaning="a text", nullable=False)]
        )
    assert str(caught.value) == (
        "alter rows: columns and consumers must be new or the same as they are, got 1 difference(s): "
        "column 'x': expected type string, got binary"
    )


def test_any_flight_client_sees_all_that_defines_a_table(uri, client):
    """Plain pyarrow: field metadata for columns, schema metadata for the table."""
    client.create_table(rollouts_spec(max_age_s=60.0))
    plain = paflight.connect(uri)
    descriptor = paflight.FlightDescriptor.for_path("rollouts")
    for schema in (plain.get_flight_info(descriptor).schema, plain.get_schema(descriptor).schema):
        notes = {key.decode(): json.loads(value) for key, value in schema.metadata.items() if key != b"table"}
        assert [consumer["name"] for consumer in notes["consumers"]] == ["actor", "recorder"]
        assert notes["consumers"][0]["sampler"] == "groups"
        assert notes["staleness"]["consumer"] == "actor"
        assert (notes["group_size"], notes["capacity_rows"], notes["max_age_s"]) == (2, 64, 60.0)
        assert schema.field("advantage").metadata[b"writer"] == b"actor"


def test_dead_letters_are_read_and_requeued(client):
    """With their reason, consumer and attempts; filters of ordinary reads are refused."""
    client.create_table(rows_spec(max_attempts=2))
    client.put("rows", rows("a", "b"))
    for _ in range(2):
        lease = client.take("rows", "c", max_rows=1)
        client.nack("rows", "c", lease_id=lease.lease_id, reason="cannot decode")
    dead = client.read("rows", state="dead", consumer="c")
    assert dead.select(["uid", "x", "dead_consumer", "dead_attempts", "dead_reason"]).to_pylist() == [
        {"uid": "a", "x": "text", "dead_consumer": "c", "dead_attempts": 2, "dead_reason": "cannot decode"}
    ]
    assert client.stats("rows")["dead_rows"] == 1
    with pytest.raises(InvalidRequestError, match="dead letters must be read by consumer, uids and max_rows"):
        client.read("rows", state="dead", newest=True)
    with pytest.raises(InvalidRequestError, match="consumer must be one of \\['c'\\], got 'd'"):
        client.read("rows", state="dead", consumer="d")
    assert client.requeue("rows", "c", ["a"]) == 1
    assert client.requeue("rows", "c") == 0
    again = client.take("rows", "c", max_rows=9)
    assert again.table.select(["uid", "attempt"]).to_pydict() == {"uid": ["a", "b"], "attempt": [1, 1]}
    client.ack("rows", "c", lease_id=again.lease_id)
    assert client.stats("rows")["rows"] == 0


def test_truncate_voids_leases_and_goes_on(client):
    """Row numbers go on, uids may come again."""
    client.create_table(rows_spec())
    client.put("rows", rows("a", "b"))
    lease = client.take("rows", "c", max_rows=1)
    client.seal("rows")
    assert client.truncate_table("rows") == 2
    with pytest.raises(LeaseLostError):
        client.ack("rows", "c", lease_id=lease.lease_id)
    assert client.put("rows", rows("a")).row_ids == (2,)
    stats = client.stats("rows")
    assert (stats["rows"], stats["put"], stats["truncated"], stats["sealed"]) == (1, 1, 2, False)


def test_waiting_trainer_learns_the_end_when_the_last_prompt_is_skipped(uri, client):
    """At once, not by its deadline: the skip of a prompt is what it waited for."""
    client.create_table(prompts_spec())
    client.create_table(rollouts_spec(1))
    client.put("prompts", pa.table({"uid": ["p0"], "text": ["a"]}), writer="preprocess")
    client.seal("rollouts", 2)
    prompts = client.take("prompts", "rollout", max_rows=1, policy_version=0)
    answers = []

    def wait():
        with QueueClient(uri, identity="trainer", deadline_s=30.0) as trainer:
            answers.append(trainer.take("rollouts", "actor", max_rows=4).status)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    began = time.monotonic()
    client.nack("prompts", "rollout", lease_id=prompts.lease_id, reason="no picture", requeue=False)
    waiting.join(20.0)
    assert answers == ["sealed"]
    assert time.monotonic() - began < 10.0
    assert client.stats("rollouts")["never_coming"] == 2


def test_server_full_says_which_table_and_consumer_is_slow(client):
    """The bound of all tables together."""
    client.create_table(rows_spec("big"))
    client.create_table(rows_spec("small"))
    for number in range(3):
        client.put("big", rows(f"r{number}", value="x" * 900_000))
    with pytest.raises(
        DeadlineExceededError, match=r"table 'big' holds .* consumer 'c' is furthest behind with 3 rows"
    ):
        client.put("big", rows("r9", value="x" * 900_000), deadline_s=0.1)
    client.put("small", rows("r0", value="x" * 900_000), deadline_s=0.1)


def test_values_on_disk_are_taken_like_others(client):
    """Take and read do not see where values lie."""
    client.create_table(rows_spec(spill=True, memory_bytes=200_000))
    for number in range(10):
        client.put("rows", rows(f"r{number}", value=str(number) * 100_000))
    stats = client.stats("rows")
    assert stats["disk_bytes"] > 700_000
    lease = client.take("rows", "c", max_rows=10)
    assert [value[0] for value in lease.table.column("x").to_pylist()] == [
        str(number) for number in range(10)
    ]
    client.ack("rows", "c", lease_id=lease.lease_id)
    assert client.stats("rows")["disk_bytes"] == 0


def test_silent_put_is_ended_and_its_client_goes_on(uri, client):
    """The thread of the server is free, what was acknowledged stays, and the client connects anew."""
    client.create_table(rows_spec())
    plain = paflight.connect(uri)
    descriptor = paflight.FlightDescriptor.for_path("rows")
    writer, reader = plain.do_put(descriptor, rows("a").schema)
    writer.write_table(rows("a"))
    assert json.loads(reader.read().to_pybytes())["num_rows"] == 1
    # Silent now. The read of the next acknowledgement ends when the server cuts the connection.
    with pytest.raises((paflight.FlightError, pa.ArrowException, OSError)):  # noqa: PT012 - either may see it first
        reader.read()
        writer.close()
    assert client.read("rows").column("uid").to_pylist() == ["a"]
    [info] = list(plain.list_flights())
    assert info.total_records == 1


def test_unavailable_server_is_still_named(client):
    """The class of the error when nobody answers, for contrast with a cut connection."""
    with (
        QueueClient("grpc://127.0.0.1:9", identity="t", deadline_s=1.0) as lost,
        pytest.raises(UnavailableError),
    ):
        lost.ping()
