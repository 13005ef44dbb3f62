"""Generalized advantage estimation against hand-computed numbers."""

from __future__ import annotations

import pytest
import torch

from relax.algorithms.gae import gae

ROWS = torch.tensor([0, 0, 0, 1])
REWARDS = torch.tensor([0.0, 0.0, 1.0, -1.0])
VALUES = torch.tensor([0.5, 0.25, 0.75, 0.5])


@pytest.mark.parametrize(
    ("discount", "lam", "advantages"),
    [
        # lambda 1: reward to go minus value; lambda 0: one step; 0.5: delta + 0.5 of the next advantage
        (1.0, 1.0, [0.5, 0.75, 0.25, -1.5]),
        (1.0, 0.0, [-0.25, 0.5, 0.25, -1.5]),
        (1.0, 0.5, [0.0625, 0.625, 0.25, -1.5]),
        (0.5, 1.0, [-0.25, 0.25, 0.25, -1.5]),
    ],
)
def test_gae_by_hand(discount, lam, advantages) -> None:
    """Rows do not reach into one another; returns are advantages plus values."""
    made = gae(REWARDS, VALUES, ROWS, discount, lam)
    torch.testing.assert_close(made.advantages_N, torch.tensor(advantages))
    torch.testing.assert_close(made.returns_N, torch.tensor(advantages) + VALUES)


def test_gae_passes_over_masked_tokens() -> None:
    """With its middle token masked, row 0 is as if that were not there, whatever it holds; its reward goes back."""
    mask = torch.tensor([True, False, True, True])
    values = VALUES.clone()
    values[1] = float("nan")
    rewards = torch.tensor([0.0, -0.5, 1.0, -1.0])
    made = gae(rewards, values, ROWS, 1.0, 0.5, mask)
    short = gae(torch.tensor([-0.5, 1.0]), VALUES[[0, 2]], torch.tensor([0, 0]), 1.0, 0.5)
    torch.testing.assert_close(made.advantages_N[[0, 2]], short.advantages_N)
    assert made.advantages_N[1] == made.returns_N[1] == 0
