"""Room for all tables of a server together, and who is slow."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest

from flight.broker import Broker, Wait
from flight.errors import CapacityError, DeadlineExceededError
from flight.schema import Column, ConsumerSpec, TableSpec
from flight.state.ledger import TakeRequest
from tests.kit.clock import FakeClock

NOW = Wait(deadline=0.0)
ROW_BYTES = 1008
CAPACITY = 20 * ROW_BYTES


def open_broker(*names: str, clock=None, **changes) -> Broker:
    """Return a broker for twenty rows in all."""
    broker = Broker(clock=clock or FakeClock(), capacity_bytes=CAPACITY)
    for name in names:
        column = Column(name="x", type=pa.binary(), meaning="bytes")
        consumer = ConsumerSpec(name=f"{name}_reader", columns=("x",))
        broker.create_table(
            TableSpec(name=name, columns=(column,), consumers=(consumer,), **changes), exist_ok=False
        )
    return broker


def put(broker, name, *numbers, wait=NOW):
    """Put rows one by one; `retain` keeps 1008 bytes of each."""
    for number in numbers:
        batch = pa.record_batch({"uid": [f"r{number}"], "x": pa.array([b"x" * 1000], pa.binary())})
        broker.put(name, batch, "", wait)


def test_server_has_room_for_all_tables_together_and_a_share_for_each():
    """One table may take what is free, but not the share of another, which then always has room."""
    broker = open_broker("prompts", "rollouts")
    put(broker, "prompts", *range(15))
    with pytest.raises(DeadlineExceededError) as caught:
        put(broker, "prompts", 15)
    assert str(caught.value) == (
        "put into prompts: room for 1 rows and 1008 bytes must come before the deadline, got 0 of the server's 20160 "
        "bytes; table 'prompts' holds 15120 of them: consumer 'prompts_reader' is furthest behind with 15 rows "
        "to finish"
    )
    put(broker, "rollouts", *range(5))
    with pytest.raises(DeadlineExceededError, match="table 'prompts' holds 15120 of them"):
        put(broker, "rollouts", 5)
    total = sum(each["bytes"] for each in broker.stats().values())
    assert total <= CAPACITY


def test_ack_in_one_table_makes_room_in_another():
    """A producer that waits for the server is woken by whoever frees bytes."""
    broker = Broker(capacity_bytes=4 * ROW_BYTES)
    for name in ("a", "b"):
        column = Column(name="x", type=pa.binary(), meaning="bytes")
        consumer = ConsumerSpec(name="c", columns=("x",))
        broker.create_table(TableSpec(name=name, columns=(column,), consumers=(consumer,)), exist_ok=False)
    put(broker, "a", 0, 1, 2)
    put(broker, "b", 0)
    done = threading.Event()

    def wait_for_room():
        put(broker, "b", 1, wait=Wait(deadline=broker.clock() + 20.0))
        done.set()

    threading.Thread(target=wait_for_room, daemon=True).start()
    assert not done.wait(0.05)
    lease = broker.take("a", TakeRequest(consumer="c", max_rows=2), None, NOW)
    broker.ack("a", "c", lease.lease_id, None)
    assert done.wait(10.0)


def test_batch_larger_than_the_server_is_refused():
    """Waiting would not help."""
    broker = open_broker("t")
    batch = pa.record_batch({"uid": ["r"], "x": pa.array([b"x" * 2 * CAPACITY], pa.binary())})
    with pytest.raises(
        CapacityError, match="one batch must be at most the server's capacity_bytes 20160, got 40328"
    ):
        broker.put("t", batch, "", NOW)


def test_dead_letters_make_room_for_new_rows():
    """Rows and bytes that only dead letters keep are given to whoever needs them, oldest first."""
    broker = open_broker("t", capacity_rows=3, max_attempts=1)
    put(broker, "t", 0, 1, 2)
    lease = broker.take("t", TakeRequest(consumer="t_reader", max_rows=2), None, NOW)
    broker.nack("t", "t_reader", lease.lease_id, None, reason="broken", requeue=True)
    dead = broker.read_dead("t", columns=["x"])
    assert dead.column("uid").to_pylist() == ["r0", "r1"]
    assert dead.column_names[-3:] == ["dead_consumer", "dead_attempts", "dead_reason"]
    assert dead.to_pylist()[0]["dead_reason"] == "broken"
    put(broker, "t", 3)
    assert broker.read_dead("t").column("uid").to_pylist() == ["r1"]
    stats = broker.stats("t")["t"]
    assert (stats["rows"], stats["dead_rows"], stats["dead_discarded"]) == (3, 1, 1)
    assert stats["bytes"] == 3 * ROW_BYTES
    assert broker.requeue("t", "t_reader", None) == 1


def test_rows_that_are_too_old_wake_who_waits_for_room():
    """Time alone makes room: the producer need not be woken by anybody."""
    clock = FakeClock()
    broker = open_broker("t", clock=clock, capacity_rows=1, max_age_s=60.0)
    put(broker, "t", 0)
    with pytest.raises(DeadlineExceededError):
        put(broker, "t", 1)
    clock.advance(60.0)
    put(broker, "t", 1)
    assert broker.stats("t")["t"]["expired"] == 1


def test_alter_and_truncate_wake_who_waits():
    """A consumer that is added is served; a truncated table has room; rows that were there have nulls."""
    broker = open_broker("t", capacity_rows=2)
    put(broker, "t", 0, 1)
    score = Column(name="score", type=pa.float32(), meaning="score", writer="judge", nullable=True)
    spec = broker.alter_table("t", [score], [ConsumerSpec(name="late", columns=("x",))])
    assert spec.columns_by_name["score"] == score
    answer = broker.take("t", TakeRequest(consumer="late", max_rows=2), ["score"], NOW)
    assert answer.table.column("score").to_pylist() == [None, None]
    part = pa.record_batch({"uid": ["r1"], "score": pa.array([0.5], pa.float32())})
    broker.put("t", part, "judge", NOW)
    assert broker.truncate_table("t") == 2
    assert broker.size("t") == (0, 0)
    put(broker, "t", 0)
