"""How long a client waits between tries, and when it gives up."""

from __future__ import annotations

import pytest

from flight.client.patience import waits
from tests.kit.clock import FakeClock


def tried(clock: FakeClock, patience_s: float, draw: float, each_s: float = 0.0) -> list[float]:
    """Return the waits of a client that waits them all, each try taking `each_s`."""
    found = []
    for delay_s in waits(patience_s, clock=clock, draw=lambda: draw):
        found.append(delay_s)
        clock.advance(delay_s + each_s)
    return found


def test_waits_grow_up_to_two_seconds_and_end_with_the_patience():
    """Doubled each time; the last one is cut, so that the sum is the patience."""
    found = tried(FakeClock(), 10.0, draw=1.0)
    assert found[:7] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert sum(found) == pytest.approx(10.0)


def test_waits_are_drawn_from_half_to_all():
    """So that clients that lost the same server do not come back at the same moment."""
    assert tried(FakeClock(), 10.0, draw=0.0)[:3] == [0.025, 0.05, 0.1]


def test_time_that_tries_take_counts():
    """A server that lets every try hang does not make the patience longer."""
    assert len(tried(FakeClock(), 10.0, draw=1.0, each_s=6.0)) == 2


def test_without_patience_there_is_one_try():
    """No wait at all."""
    assert tried(FakeClock(), 0.0, draw=1.0) == []
