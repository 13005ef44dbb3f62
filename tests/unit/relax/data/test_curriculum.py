"""The curriculum: what is preferred, what is put off, what comes back, and its state on disk."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.data.config import CurriculumConfig
from relax.data.curriculum import Curriculum
from relax.data.errors import PositionError


def _curriculum(**changed: float) -> Curriculum:
    return Curriculum(CurriculumConfig(enabled=True, **changed), {"a": 4, "b": 2}, seed=0)


def test_prompts_in_the_band_and_new_ones_are_taken() -> None:
    """The band's ends belong to it; what has no reward yet is always taken."""
    curriculum = _curriculum(low=0.25, high=0.75, retry=1e-9)
    for row, mean in enumerate((0.25, 0.75, 0.0, 1.0)):
        curriculum.observe("a", row, mean)
    assert [curriculum.admits("a", row, row) for row in range(4)] == [True, True, False, False]
    assert curriculum.admits("b", 0, 9)
    assert curriculum.num_put_off == 2


def test_newest_rewards_count_most() -> None:
    """A prompt wanders into the band and out of it; a reward that is no number says nothing."""
    curriculum = _curriculum(memory=0.5)
    for mean, expected in ((0.0, 0.0), (1.0, 0.5), (float("nan"), 0.5), (1.0, 0.75)):
        curriculum.observe("a", 1, mean)
        assert curriculum.mean("a", 1) == expected
    assert curriculum.mean("a", 0) is None
    assert curriculum.mean("b", 1) is None


@given(st.floats(0.05, 1.0), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_share_of_the_draws_outside_the_band_is_taken(retry: float, seed: int) -> None:
    """About `retry` of them, the same ones each time, so that no run stands still."""
    taken = []
    for _ in range(2):
        curriculum = Curriculum(CurriculumConfig(retry=retry), {"a": 1}, seed=seed)
        curriculum.observe("a", 0, 0.0)
        taken.append([curriculum.admits("a", 0, number) for number in range(2000)])
    assert taken[0] == taken[1]
    assert abs(sum(taken[0]) / 2000 - retry) < 0.06


def test_state_is_restored_exactly() -> None:
    """Through JSON; that of other sources is refused and changes nothing."""
    curriculum = _curriculum()
    curriculum.observe("a", 3, 0.3)
    curriculum.observe("b", 0, 0.9)
    other = _curriculum()
    other.observe("a", 0, 1.0)
    other.restore(json.loads(json.dumps(curriculum.state())))
    assert other.state() == curriculum.state()
    for state in ({"a": {"rows": [], "means": []}}, {"a": {"rows": [7], "means": [0.0]}, "b": {}}, {"a": 3}):
        with pytest.raises(PositionError, match=r"^curriculum: state must be of sources"):
            other.restore(state)
    assert other.state() == curriculum.state()
