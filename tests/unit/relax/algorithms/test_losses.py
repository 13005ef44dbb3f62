"""Policy losses against hand-computed numbers and finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.losses import BY_NAME, importance_ratio, ppo_clip, token_weights, truncated_is

PLAIN = AlgorithmConfig(clip_low=0.2, clip_high=0.3)


def log(*ratios: float) -> torch.Tensor:
    """Return the log-probability differences that give these ratios."""
    return torch.tensor([math.log(ratio) for ratio in ratios])


def test_importance_ratio_cannot_overflow() -> None:
    """Differences are cut at 20 nats either way."""
    ratio = importance_ratio(torch.tensor([0.5, 500.0, -500.0]), torch.zeros(3))
    torch.testing.assert_close(ratio, torch.tensor([0.5, 20.0, -20.0]).exp())


def test_ppo_clip_takes_the_worse_of_plain_and_bounded() -> None:
    """Ratios inside, above and below the bounds, with both signs of the advantage."""
    ratios = log(1.1, 2.0, 0.5, 2.0, 0.5)
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    result = ppo_clip(ratios, torch.zeros(5), advantages, PLAIN)
    torch.testing.assert_close(result.loss_N, torch.tensor([-1.1, -1.3, -0.5, 2.0, 0.8]))
    assert result.clipped_N.tolist() == [False, True, False, False, True]
    torch.testing.assert_close(result.ratio_N, torch.tensor([1.1, 2.0, 0.5, 2.0, 0.5]))


def test_ppo_clip_dual_bounds_the_loss_of_bad_tokens() -> None:
    """With dual clip 3 a ratio of 10 on advantage -1 costs 3, and good tokens are as before."""
    config = AlgorithmConfig(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    result = ppo_clip(log(10.0, 2.0, 10.0), torch.zeros(3), torch.tensor([-1.0, -1.0, 1.0]), config)
    torch.testing.assert_close(result.loss_N, torch.tensor([3.0, 2.0, -1.3]))
    assert result.clipped_N.tolist() == [True, False, True]


def test_truncated_is_weighs_logprobs_by_the_cut_ratio() -> None:
    """The weight is a constant of the gradient: cap * advantage above the cap, ratio * advantage below."""
    logprobs = (log(1.5, 6.0) - 1.0).requires_grad_()
    result = truncated_is(logprobs, torch.full((2,), -1.0), torch.tensor([2.0, 2.0]), AlgorithmConfig())
    torch.testing.assert_close(result.loss_N, torch.tensor([-3.0, -4.0]) * logprobs)
    result.loss_N.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-3.0, -4.0]))
    assert result.clipped_N.tolist() == [False, True]


def test_losses_on_policy_have_the_policy_gradient() -> None:
    """At ratio one every loss has gradient minus advantage."""
    for loss in BY_NAME.values():
        logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
        loss(logprobs, logprobs.detach(), torch.tensor([0.5, -1.5]), PLAIN).loss_N.sum().backward()
        torch.testing.assert_close(logprobs.grad, torch.tensor([-0.5, 1.5]))


def test_ppo_clip_gradient_equals_finite_differences() -> None:
    """Also where the clip has taken it."""
    generator = torch.Generator().manual_seed(0)
    trainer = torch.randn(40, dtype=torch.float64, generator=generator).requires_grad_()
    rollout, advantages = (torch.randn(40, dtype=torch.float64, generator=generator) for _ in range(2))
    config = AlgorithmConfig(clip_low=0.2, clip_high=0.3, dual_clip=2.0)
    assert torch.autograd.gradcheck(lambda x: ppo_clip(x, rollout, advantages, config).loss_N, trainer)


def test_token_weights_reduce_as_they_say() -> None:
    """Rows of one and of three tokens."""
    lengths = torch.tensor([1, 3])
    torch.testing.assert_close(token_weights(lengths, "token_mean"), torch.full((4,), 0.25))
    expected = torch.tensor([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    torch.testing.assert_close(token_weights(lengths, "sequence_mean"), expected)
    torch.testing.assert_close(token_weights(lengths, "sequence_sum"), torch.full((4,), 0.5))
    with pytest.raises(
        ValueError, match="reduction must be token_mean, sequence_mean or sequence_sum, got 'sum'"
    ):
        token_weights(lengths, "sum")
