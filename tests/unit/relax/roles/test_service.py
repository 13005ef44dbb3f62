"""The clock of a service's parts."""

from __future__ import annotations

import pytest

from relax.roles.service import PartClock
from tests.kit.clock import FakeClock


def test_part_clock_adds_up_parts_and_begins_anew():
    """Seconds of each part since the last report."""
    now = FakeClock()
    clock = PartClock(now)
    for seconds in (1.0, 2.5):
        with clock.part("wait"):
            now.advance(seconds)
    now.advance(100.0)
    with clock.part("put"):
        now.advance(0.5)
    assert clock.report() == {"time/wait_s": 3.5, "time/put_s": 0.5}
    assert clock.report() == {}


def test_part_clock_counts_a_part_that_fails():
    """The time was spent all the same."""
    now = FakeClock()
    clock = PartClock(now)

    def encode() -> None:
        with clock.part("encode"):
            now.advance(2.0)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        encode()
    assert clock.report() == {"time/encode_s": 2.0}


def test_part_clock_counts_a_part_inside_another_once():
    """The outer one has what is left."""
    now = FakeClock()
    clock = PartClock(now)
    with clock.part("unpack"):
        now.advance(1.0)
        with clock.part("fetch"):
            now.advance(4.0)
        now.advance(2.0)
    assert clock.report() == {"time/unpack_s": 3.0, "time/fetch_s": 4.0}
