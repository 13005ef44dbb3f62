"""Limits of silence."""

from __future__ import annotations

import pytest

from relax.control.errors import ControlRefusedError
from relax.control.timings import AttentiveClock, ControlTimings


def test_timings_refuse_a_timeout_below_two_heartbeats():
    """One late heartbeat must not look like a loss."""
    with pytest.raises(ControlRefusedError) as raised:
        ControlTimings(heartbeat_s=1.0, member_timeout_s=1.5)
    assert str(raised.value) == (
        "ControlTimings: member_timeout_s must be at least two heartbeats (2.0 s), got 1.5; "
        "raise it or lower heartbeat_s"
    )


def test_timings_refuse_an_interval_of_zero():
    """An interval is positive."""
    with pytest.raises(ControlRefusedError, match="heartbeat_s must be above 0, got 0"):
        ControlTimings(heartbeat_s=0)


def test_attentive_clock_counts_small_steps_whole_and_absences_little():
    """A long step counts as the largest one; a step back as none."""
    clock = AttentiveClock(max_step_s=2.0)
    assert [clock.advance(now) for now in (100.0, 101.5, 4000.0, 3999.0, 4000.0)] == [0.0, 1.5, 3.5, 3.5, 4.5]
