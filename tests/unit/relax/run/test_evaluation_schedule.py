"""Versions that are evaluated, and snapshots that stay for it."""

from __future__ import annotations

import pytest

from relax.run.evaluation_schedule import EvaluationSchedule, Kept

SCHEDULE = EvaluationSchedule(num_steps=25, interval_steps=10, versions=frozenset({3, 10}), max_waiting=2)


def test_schedule_has_the_first_the_last_the_intervals_and_the_named():
    """Each once, in order."""
    assert SCHEDULE.due(-1, 25) == [0, 3, 10, 20, 25]
    assert SCHEDULE.due(3, 19) == [10]
    assert EvaluationSchedule(num_steps=25).due(-1, 25) == [0, 25]
    assert EvaluationSchedule(num_steps=25, interval_steps=1, has_prompts=False).due(-1, 25) == []


def test_surplus_of_the_interval_is_left_out_oldest_first():
    """Named versions and the last one stay, however many wait."""
    assert SCHEDULE.without_surplus([3, 20]) == [3, 20]
    assert SCHEDULE.without_surplus([0, 3, 10, 20, 25]) == [3, 10, 25]
    assert SCHEDULE.without_surplus([0, 20]) == [0, 20]


def test_snapshots_stay_until_the_driver_has_come_to_them():
    """What it has not seen yet stays if the schedule wants it, what it has seen if it has it in hand."""

    def stays(kept: Kept) -> list[int]:
        return [version for version in range(11) if kept.needs(version, SCHEDULE)]

    assert stays(Kept()) == [0, 3, 10]
    assert stays(Kept(seen=5, versions=frozenset({3}))) == [3, 10]
    assert stays(Kept(seen=12)) == []


def test_what_the_driver_said_of_another_incarnation_does_not_count():
    """Nothing is known then: all that the schedule wants stays."""
    said = Kept(seen=12, versions=frozenset({7}), incarnation=1)
    assert Kept.of(said.to_value(), 1) == said
    assert Kept.of(said.to_value(), 2) == Kept(incarnation=2)
    assert Kept.of(None, 0) == Kept()


@pytest.mark.parametrize(("version", "needed"), [(7, True), (20, True), (10, False), (21, False)])
def test_need_of_a_version(version, needed):
    """In hand, or to come."""
    assert Kept(seen=12, versions=frozenset({7})).needs(version, SCHEDULE) is needed
