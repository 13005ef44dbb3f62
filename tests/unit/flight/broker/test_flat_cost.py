"""What a verb costs does not depend on how many rows the table holds, and bulk verbs cost no call a row.

Cost is counted: function calls of Python and of C, as `sys.setprofile` sees them. No time is measured.
"""

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

FEW, MANY = 1_000, 100_000
BATCH = 64
TOLERANCE = 1.02
GROUP_SIZE = 4


def calls_of(action: Callable[[], Any]) -> Counter[str]:
    """Return how many functions of Python ("call") and of C ("c_call") an action calls in this thread."""
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        counts[event] += 1

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return counts


class Filled:
    """A broker with a table of `num_rows` rows that wait: by groups with a staleness bound, or one by one."""

    def __init__(self, num_rows: int, *, by_group: bool) -> None:
        self.clock = FakeClock()
        self.broker = Broker(clock=self.clock)
        self._by_group = by_group
        self._num_put = 0
        columns = (
            Column(name="policy_version_start", type=pa.int64(), meaning="version"),
            Column(name="tokens", type=pa.list_(pa.int32()), meaning="tokens"),
        )
        staleness = StalenessSpec(max_staleness=2, rows_per_version=BATCH, consumer="train", policy="drop")
        sampler = "groups" if by_group else "fifo"
        self.broker.create_table(
            TableSpec(
                name="t",
                columns=columns,
                consumers=(
                    ConsumerSpec(name="train", columns=("tokens",), sampler=sampler),
                    ConsumerSpec(name="record", columns=("tokens",)),
                ),
                group_size=GROUP_SIZE if by_group else 1,
                staleness=staleness if by_group else None,
                capacity_rows=2 * MANY,
                max_age_s=1e6,
            ),
            exist_ok=False,
        )
        while self._num_put < num_rows:
            self.put(self.batch(min(5_000, num_rows - self._num_put)))
        # So that nothing is done for the first time while it is counted.
        self.put(self.batch(BATCH))
        self.finish("record", BATCH)
        self.finish("train", BATCH)
        self.broker.stats("t")

    @property
    def wait(self) -> Wait:
        """Return a wait that is over."""
        return Wait(deadline=self.clock())

    def batch(self, num_rows: int) -> pa.RecordBatch:
        """Return rows that were not put before."""
        first = self._num_put
        self._num_put += num_rows
        numbers = range(first, first + num_rows)
        offsets = pa.array(range(0, 2 * num_rows + 1, 2), pa.int32())
        columns = {
            "uid": pa.array([f"u{number}" for number in numbers]),
            "policy_version_start": pa.array([0] * num_rows),
            "tokens": pa.ListArray.from_arrays(offsets, pa.array([7] * 2 * num_rows, pa.int32())),
        }
        if self._by_group:
            columns["group_id"] = pa.array([f"g{number // GROUP_SIZE}" for number in numbers])
        return pa.record_batch(columns)

    def put(self, batch: pa.RecordBatch) -> None:
        """Put a batch."""
        self.broker.put("t", batch, "", self.wait)

    def take(self, consumer: str, num_rows: int) -> str:
        """Lease rows for a minute and return the lease."""
        request = TakeRequest(consumer=consumer, max_rows=num_rows, min_rows=num_rows, lease_s=60.0)
        answer = self.broker.take("t", request, None, self.wait)
        assert answer.table.num_rows == num_rows
        return answer.lease_id

    def ack(self, consumer: str, lease_id: str) -> None:
        """Finish a lease."""
        self.broker.ack("t", consumer, lease_id, None)

    def finish(self, consumer: str, num_rows: int) -> None:
        """Take the oldest rows and finish them."""
        self.ack(consumer, self.take(consumer, num_rows))


def cost_of_verbs(filled: Filled, num_rows: int = BATCH) -> dict[str, Counter[str]]:
    """Return the calls of each verb of `num_rows` rows; nobody else needs those that are acked, so they go."""
    batch = filled.batch(num_rows)
    costs = {"put": calls_of(lambda: filled.put(batch))}
    leases: list[str] = []
    costs["take"] = calls_of(lambda: leases.append(filled.take("train", num_rows)))
    filled.finish("record", num_rows)
    costs["ack"] = calls_of(lambda: filled.ack("train", leases[0]))
    assert filled.broker.stats("t")["t"]["retired"] == BATCH + num_rows
    costs["stats"] = calls_of(lambda: filled.broker.stats("t"))
    filled.take("train", num_rows)
    filled.clock.advance(61.0)
    costs["expire"] = calls_of(lambda: filled.broker.size("t"))
    assert filled.broker.stats("t")["t"]["consumers"]["train"]["expired_leases"] == 1
    return costs


@pytest.mark.parametrize("by_group", [False, True], ids=["rows", "groups"])
def test_cost_of_verbs_is_the_same_in_a_table_of_any_size(by_group: bool):
    """Put, take, ack, expiry, statistics and an announcement: a hundred times the rows, the same calls."""
    few, many = Filled(FEW, by_group=by_group), Filled(MANY, by_group=by_group)
    costs = [cost_of_verbs(each) for each in (few, many)]
    if by_group:
        for filled, cost in zip((few, many), costs, strict=True):
            cost["announce"] = calls_of(lambda filled=filled: filled.broker.announce("t", 1))
    for verb, small in costs[0].items():
        large = costs[1][verb]
        assert small["call"] > 0
        assert large.total() <= small.total() * TOLERANCE, (verb, small, large)


def test_rows_in_order_cost_no_python_call_each():
    """A batch of 512 rows makes the Python calls of one of 64, but for the look at each row that is taken."""
    small, large = (cost_of_verbs(Filled(FEW, by_group=False), num_rows) for num_rows in (64, 512))
    for verb in ("put", "ack", "stats"):
        assert large[verb]["call"] <= small[verb]["call"] * TOLERANCE, (verb, small[verb], large[verb])
    assert large["take"]["call"] - small["take"]["call"] <= 512 - 64 + 4


def test_groups_cost_no_more_a_row_in_a_larger_batch():
    """Groups are looked at row by row; the calls of a row do not grow with the rows beside it."""
    small, large = (cost_of_verbs(Filled(FEW, by_group=True), num_rows) for num_rows in (64, 512))
    for verb in ("put", "take", "ack", "expire"):
        assert large[verb].total() / 512 <= small[verb].total() / 64, (verb, small[verb], large[verb])
