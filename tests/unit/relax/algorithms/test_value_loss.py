"""The critic's loss against hand-computed numbers and finite differences."""

from __future__ import annotations

import torch

from relax.algorithms.value_loss import value_loss
from tests.kit.tokens import finite_difference, gradient


def test_value_loss_is_half_the_square_or_that_of_the_bounded_value() -> None:
    """Moves of 0.1 and 1 towards a return of 1, and of -1 away from it; at most 0.2 count as improvement."""
    values, old, returns = torch.tensor([0.1, 1.0, -1.0]), torch.zeros(3), torch.ones(3)
    made = value_loss(values, old, returns, 0.2)
    torch.testing.assert_close(made, torch.tensor([0.405, 0.32, 2.0]))
    torch.testing.assert_close(value_loss(values, old, returns, None), torch.tensor([0.405, 0.0, 2.0]))


def test_value_loss_gradient_equals_finite_differences() -> None:
    """Clipped and not."""
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(12, dtype=torch.float64, generator=generator) for _ in range(3))
    for clip in (None, 0.3):

        def total(x, clip=clip):
            return value_loss(x, old, returns, clip).sum()

        torch.testing.assert_close(
            gradient(total, values), finite_difference(total, values), atol=1e-7, rtol=1e-6
        )


def test_value_loss_does_not_see_masked_tokens() -> None:
    """NaN in, 0 out, no gradient."""
    nan = float("nan")
    values = torch.tensor([0.5, nan], requires_grad=True)
    made = value_loss(
        values, torch.tensor([0.5, nan]), torch.tensor([1.0, nan]), 0.2, torch.tensor([True, False])
    )
    made.sum().backward()
    assert made.tolist() == [0.125, 0.0]
    assert values.grad.tolist() == [-0.5, 0.0]
