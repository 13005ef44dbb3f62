"""Ticks of statistics with a clock moved by hand: rates, dropped tables, the end."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flight.broker import Broker, Wait
from flight.errors import InvalidRequestError
from flight.schema import Column, ConsumerSpec, TableSpec
from flight.server.watching import SCHEMA, RateMeter, check_interval, ticks
from flight.state.ledger import TakeRequest
from tests.kit.clock import FakeClock

SPEC = TableSpec(
    name="rows",
    columns=(Column(name="x", type=pa.int64(), meaning="a number"),),
    consumers=(ConsumerSpec(name="c", columns=("x",)), ConsumerSpec(name="k", columns=(), sampler="keyed")),
)


def test_ticks_tell_rates_since_the_last_tick_until_the_deadline():
    """Ten rows put and four taken in two seconds are five and two a second."""
    clock = FakeClock()
    broker = Broker(clock=clock)
    broker.create_table(SPEC, exist_ok=False)

    def pause(seconds: float) -> bool:
        clock.advance(seconds)
        return True

    stream = ticks(broker, None, interval_s=2.0, deadline=clock() + 5.0, pause=pause)
    first = next(stream)
    assert first.schema == SCHEMA
    assert (first["rows"].to_pylist(), first["put_per_s"].to_pylist()) == ([0], [0.0])
    now = Wait(deadline=0.0)
    names = [str(index) for index in range(10)]
    broker.put("rows", pa.record_batch({"uid": names, "x": pa.array(range(10), pa.int64())}), "", now)
    taken = broker.take("rows", TakeRequest(consumer="c", max_rows=4), None, now)
    broker.ack("rows", "c", taken.lease_id, ["0", "1"])
    [row] = next(stream).to_pylist()
    assert (row["rows"], row["put_per_s"], row["policy_version"]) == (10, 5.0, None)
    assert row["consumers"] == [
        {"name": "c", "ready": 6, "leased": 2, "taken_per_s": 2.0, "acked_per_s": 1.0},
        {"name": "k", "ready": None, "leased": None, "taken_per_s": 0.0, "acked_per_s": 0.0},
    ]
    broker.drop_table("rows")
    assert next(stream).num_rows == 0
    with pytest.raises(StopIteration):
        next(stream)


def test_ticks_end_when_nobody_reads_them():
    """`pause` says so."""
    stream = ticks(Broker(), None, interval_s=1.0, deadline=1e12, pause=lambda _: False)
    assert next(stream).num_rows == 0
    with pytest.raises(StopIteration):
        next(stream)


def test_rate_is_zero_for_a_table_made_anew():
    """Counts that went down say nothing about a rate."""
    meter = RateMeter()
    meter.look(1.0)
    meter.rate(100, "t")
    meter.look(2.0)
    assert meter.rate(3, "t") == 0.0


@pytest.mark.parametrize("interval_s", [0.0, -1.0, 61.0, float("nan"), float("inf")])
def test_interval_has_limits(interval_s):
    """Neither a flood nor a stream that looks dead."""
    with pytest.raises(InvalidRequestError, match=r"interval_s must be from 0\.1 to 60, got"):
        check_interval(interval_s)
