"""Entropy against hand-computed numbers and finite differences."""

from __future__ import annotations

import math

import torch

from relax.algorithms.entropy import entropy
from tests.kit.tokens import finite_difference, gradient


def test_entropy_of_even_and_certain_choices() -> None:
    """log 4 nats of four equal ones, 0 of a certain one, tokens of probability 0 included."""
    even = torch.full((1, 4), -math.log(4))
    certain = torch.tensor([[0.0, -math.inf, -math.inf, -math.inf]])
    torch.testing.assert_close(entropy(torch.cat((even, certain))), torch.tensor([math.log(4), 0.0]))


def test_entropy_gradient_equals_finite_differences() -> None:
    """With respect to logits."""
    logits = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def total(x):
        return entropy(x.view(2, 3).log_softmax(-1)).sum()

    torch.testing.assert_close(
        gradient(total, logits), finite_difference(total, logits), atol=1e-8, rtol=1e-6
    )


def test_entropy_has_a_finite_gradient_with_forbidden_tokens() -> None:
    """A logit of -inf, as vocabulary padding has."""
    logits = torch.tensor([[1.0, 0.5, -math.inf]], requires_grad=True)
    entropy(logits.log_softmax(-1)).sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 2] == 0
