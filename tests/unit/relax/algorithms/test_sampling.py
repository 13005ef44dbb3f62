"""Which groups teach, and what length costs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from relax.algorithms.sampling import informative_rows, overlong_penalties


def test_groups_of_equal_rewards_do_not_teach() -> None:
    """Groups mixed among one another, of several sizes; one row alone is equal to itself."""
    groups = ["a", "b", "a", "c", "b", "d", "d"]
    rewards = np.array([1.0, 0.5, 1.0, 0.0, 0.25, 0.0, 0.0])
    assert informative_rows(rewards, groups).tolist() == [False, True, False, False, True, False, False]


def test_a_reward_that_is_not_a_number_is_left_for_others_to_refuse() -> None:
    """NaN equals nothing."""
    assert informative_rows(np.array([np.nan, np.nan]), ["a", "a"]).tolist() == [True, True]
    assert informative_rows(np.zeros(0), []).tolist() == []


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(1, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (120, -1.0)]
)
def test_overlong_penalty_grows_in_the_last_part(num_tokens, penalty) -> None:
    """Limit 100, cache 20 of it."""
    assert overlong_penalties(np.array([num_tokens]), 100, 0.2).tolist() == [penalty]
    assert overlong_penalties(np.array([num_tokens]), 100, 0.2, 0.5).tolist() == [penalty / 2]


def test_overlong_penalty_of_no_part_is_none() -> None:
    """Even beyond the limit."""
    assert overlong_penalties(np.array([200]), 100, 0.0).tolist() == [0.0]


def test_sampling_imports_no_torch() -> None:
    """Services that only move rows can use it."""
    code = "import sys, relax.algorithms.sampling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
