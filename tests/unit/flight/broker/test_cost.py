"""What the verbs cost in operations: the same whatever waits in the table, and next to nothing a row. No timing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest

from flight.broker import Broker, Wait
from flight.schema import Column, ConsumerSpec, StalenessSpec, TableSpec
from flight.state.ledger import TakeRequest
from tests.kit.clock import FakeClock

NOW = Wait(deadline=0.0)
FEW, MANY = 1_000, 40_000
STEP = 64
"""Rows of the put, take and ack that are counted."""

TOLERANCE = 0.02


def make_broker(sampler: str, *, is_bounded: bool = False) -> Broker:
    """Return a broker with one table, of groups of four or of single rows, with or without a staleness bound."""
    broker = Broker(clock=FakeClock())
    broker.create_table(
        TableSpec(
            name="rows",
            columns=(
                Column(name="tokens", type=pa.list_(pa.int32()), meaning="tokens"),
                Column(name="policy_version_start", type=pa.int64(), meaning="version"),
                Column(name="advantage", type=pa.float32(), meaning="advantage", writer="actor"),
            ),
            consumers=(
                ConsumerSpec(name="train", columns=("tokens", "policy_version_start"), sampler=sampler),
                ConsumerSpec(name="record", columns=("tokens",)),
            ),
            group_size=4 if sampler == "groups" else 1,
            staleness=StalenessSpec(max_staleness=1, rows_per_version=MANY, consumer="train", policy="drop")
            if is_bounded
            else None,
            capacity_rows=4 * MANY,
            max_age_s=1e9,
        ),
        exist_ok=False,
    )
    return broker


def batch(first: int, num_rows: int) -> pa.RecordBatch:
    """Return rows numbered from `first`, four a group."""
    numbers = range(first, first + num_rows)
    return pa.record_batch(
        {
            "uid": [f"r{number}" for number in numbers],
            "group_id": [f"g{number // 4}" for number in numbers],
            "tokens": pa.array([[1, 2, 3]] * num_rows, pa.list_(pa.int32())),
            "policy_version_start": pa.array([0] * num_rows, pa.int64()),
        }
    )


def counted(action: Callable[[], Any]) -> Counter[str]:
    """Return how many Python instructions and calls of Python functions an action makes."""
    counts: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        counts[event] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return counts


def course(broker: Broker, first: int, num_rows: int = STEP) -> dict[str, Counter[str]]:
    """Do each verb once with `num_rows` rows from number `first` on, and return what each cost."""
    take = TakeRequest(consumer="train", max_rows=num_rows, min_rows=num_rows, lease_s=10.0)
    clock = broker.clock
    assert isinstance(clock, FakeClock)
    rows = batch(first, num_rows)
    filling = pa.record_batch(
        {"uid": rows.column("uid"), "advantage": pa.array([0.0] * num_rows, pa.float32())}
    )
    leases: list[str] = []
    costs = {
        "put": counted(lambda: broker.put("rows", rows, "", NOW)),
        "put a part": counted(lambda: broker.put("rows", filling, "actor", NOW)),
        "take": counted(lambda: leases.append(broker.take("rows", take, None, NOW).lease_id)),
        "ack": counted(lambda: broker.ack("rows", "train", leases[0], None)),
        "stats": counted(broker.stats),
    }
    leases.append(broker.take("rows", take, None, NOW).lease_id)
    costs["nack"] = counted(
        lambda: broker.nack("rows", "train", leases[1], None, reason="no reason", requeue=True)
    )
    broker.take("rows", take, None, NOW)
    costs["nothing expires"] = counted(broker.list_tables)
    clock.advance(20.0)
    costs["expire"] = counted(broker.list_tables)
    return costs


@pytest.mark.parametrize(("sampler", "is_bounded"), [("fifo", False), ("groups", False), ("groups", True)])
def test_cost_does_not_depend_on_the_rows_of_the_table(sampler, is_bounded):
    """With forty times the rows waiting, each verb executes as many Python instructions as before."""
    costs = []
    for num_waiting in (FEW, MANY):
        broker = make_broker(sampler, is_bounded=is_bounded)
        broker.put("rows", batch(0, num_waiting), "", NOW)
        course(broker, num_waiting)
        costs.append(course(broker, num_waiting + STEP))
        if is_bounded:
            costs[-1]["announce"] = counted(lambda broker=broker: broker.announce("rows", 1))
    few, many = costs
    for verb, counts in few.items():
        assert many[verb]["opcode"] == pytest.approx(counts["opcode"], rel=TOLERANCE), verb


def test_rows_in_order_make_no_python_call_each():
    """Eight times the rows in a put, a take or an ack are as many calls; a take looks once whether a row is ready."""
    costs = []
    for num_rows in (STEP, 8 * STEP):
        broker = make_broker("fifo")
        broker.put("rows", batch(0, 16 * STEP), "", NOW)
        costs.append(course(broker, 16 * STEP, num_rows))
    small, large = costs
    for verb in ("put", "put a part", "ack", "nack"):
        assert large[verb]["call"] - small[verb]["call"] <= 8, verb
    assert large["take"]["call"] - small["take"]["call"] <= 7 * STEP + 8


def test_row_costs_few_instructions():
    """Put, take and ack of a row together are at most 300 Python instructions, with a second consumer waiting."""
    costs = []
    for num_rows in (STEP, 8 * STEP):
        broker = make_broker("fifo")
        broker.put("rows", batch(0, 16 * STEP), "", NOW)
        costs.append(course(broker, 16 * STEP, num_rows))
    small, large = (sum(cost[verb]["opcode"] for verb in ("put", "take", "ack")) for cost in costs)
    assert large - small <= 300 * 7 * STEP
