"""Advantages against hand-computed numbers."""

from __future__ import annotations

import math

import pytest
import torch

from relax.algorithms.advantages import BY_NAME, dr_grpo, grpo, rloo

REWARDS = torch.tensor([1.0, 5.0, 0.0, 5.0, 1.0, 2.0])
GROUPS = torch.tensor([0, 1, 0, 1, 0, 2])


def test_grpo_is_the_standard_score_within_a_group() -> None:
    """Group 0 has rewards 1, 0, 1: mean 2/3, sample deviation 1/sqrt(3); the others have no spread."""
    root = math.sqrt(3)
    expected = torch.tensor([root / 3, 0.0, -2 * root / 3, 0.0, root / 3, 0.0])
    torch.testing.assert_close(grpo(REWARDS, GROUPS), expected)


def test_dr_grpo_is_the_distance_from_the_group_mean() -> None:
    """No division by the deviation."""
    expected = torch.tensor([1 / 3, 0.0, -2 / 3, 0.0, 1 / 3, 0.0])
    torch.testing.assert_close(dr_grpo(REWARDS, GROUPS), expected)


def test_rloo_compares_with_the_other_rows() -> None:
    """Row 0 against the mean of 0 and 1; a group of one row has nothing to compare with."""
    expected = torch.tensor([0.5, 0.0, -1.0, 0.0, 0.5, 0.0])
    torch.testing.assert_close(rloo(REWARDS, GROUPS), expected)


@pytest.mark.parametrize("name", BY_NAME)
def test_advantages_do_not_depend_on_a_shift_or_on_the_order_of_rows(name) -> None:
    """Adding a constant to a group's rewards changes nothing; permuting rows permutes the result."""
    advantage = BY_NAME[name]
    plain = advantage(REWARDS, GROUPS)
    torch.testing.assert_close(advantage(REWARDS + 10.0, GROUPS), plain, atol=1e-5, rtol=0)
    order = torch.tensor([5, 3, 1, 0, 2, 4])
    torch.testing.assert_close(advantage(REWARDS[order], GROUPS[order]), plain[order])


def test_grpo_of_equal_rewards_is_zero_despite_rounding() -> None:
    """0.1 is not exact in binary; its mean may differ from it in the last bit."""
    assert grpo(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.long)).abs().max() == 0
