"""Policy losses against hand-computed numbers and finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.inputs import LossInputs
from relax.algorithms.losses import BY_NAME
from tests.kit.tokens import ROWS, finite_difference, gradient, inputs_of, log, random_tokens

PLAIN = AlgorithmConfig(clip_low=0.2, clip_high=0.3)


def test_ppo_clip_takes_the_worse_of_plain_and_bounded() -> None:
    """Ratios inside, above and below the bounds, with both signs of the advantage."""
    inputs = inputs_of(log(1.1, 2.0, 0.5, 2.0, 0.5), [1.0, 1.0, 1.0, -1.0, -1.0])
    result = BY_NAME["ppo_clip"](inputs, PLAIN)
    torch.testing.assert_close(result.loss_N, torch.tensor([-1.1, -1.3, -0.5, 2.0, 0.8]))
    assert result.clipped_N.tolist() == [False, True, False, False, True]
    torch.testing.assert_close(result.ratio_N, torch.tensor([1.1, 2.0, 0.5, 2.0, 0.5]))


def test_ppo_clip_dual_bounds_the_loss_of_bad_tokens() -> None:
    """With dual clip 3 a ratio of 10 on advantage -1 costs 3, and good tokens are as before."""
    config = AlgorithmConfig(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    result = BY_NAME["ppo_clip"](inputs_of(log(10.0, 2.0, 10.0), [-1.0, -1.0, 1.0]), config)
    torch.testing.assert_close(result.loss_N, torch.tensor([3.0, 2.0, -1.3]))
    assert result.clipped_N.tolist() == [True, False, True]


def test_gspo_clips_rows_by_the_geometric_mean() -> None:
    """Row 0 has ratios 1 and 4, mean 2, clipped for a good row; row 1 has 0.9 and 0.9, and is not."""
    config = AlgorithmConfig(policy_loss="gspo", clip_low=0.2, clip_high=0.3)
    inputs = inputs_of(log(1.0, 4.0, 0.9, 0.9), [2.0, 2.0, 1.0, 1.0], rows=[0, 0, 1, 1])
    result = BY_NAME["gspo"](inputs, config)
    torch.testing.assert_close(result.loss_N, torch.tensor([-2.6, -2.6, -0.9, -0.9]))
    torch.testing.assert_close(result.ratio_N, torch.tensor([2.0, 2.0, 0.9, 0.9]))
    assert result.clipped_N.tolist() == [True, True, False, False]


def test_gspo_leaves_masked_tokens_out_of_the_mean() -> None:
    """The masked token's ratio of 100 does not count, and its loss is 0."""
    ratios, mask = log(2.0, 100.0, 2.0), torch.tensor([True, False, True])
    inputs = LossInputs.of(
        ratios, torch.zeros(3), torch.full((3,), -1.0), torch.zeros(3, dtype=torch.long), mask
    )
    result = BY_NAME["gspo"](inputs, AlgorithmConfig(policy_loss="gspo"))
    torch.testing.assert_close(result.loss_N, torch.tensor([2.0, 0.0, 2.0]))


def test_cispo_weighs_logprobs_by_the_clipped_ratio() -> None:
    """Logprobs are log ratio - 1; weights 0.5, 1.3 (cut from 2) and 0.8 (cut from 0.1)."""
    ratios = log(0.9, 2.0, 0.1)
    result = BY_NAME["cispo"](inputs_of(ratios, [1.0, 1.0, -2.0]), PLAIN)
    torch.testing.assert_close(result.loss_N, torch.tensor([-0.9, -1.3, 1.6]) * (ratios - 1.0))
    assert result.clipped_N.tolist() == [False, True, True]
    no_lower = AlgorithmConfig(policy_loss="cispo", clip_low=1.0, clip_high=4.0)
    result = BY_NAME["cispo"](inputs_of(log(1e-4, 9.0), [1.0, 1.0]), no_lower)
    assert result.clipped_N.tolist() == [False, True]


def test_sapo_gates_by_a_sigmoid() -> None:
    """At ratio 1 the gate is 2 / tau; at ratio 2 and tau 1 it is 4 sigmoid(1)."""
    result = BY_NAME["sapo"](inputs_of(log(1.0, 2.0, 1.0), [1.0, 1.0, -1.0]), AlgorithmConfig())
    gates = [2.0, 4 / (1 + math.exp(-1)), 2 / 1.05]
    torch.testing.assert_close(result.loss_N, torch.tensor([-gates[0], -gates[1], gates[2]]))


def test_surrogate_and_reinforce_are_what_they_say() -> None:
    """-A r, and -A log p."""
    inputs = inputs_of(log(2.0, 0.5), [1.0, -3.0])
    torch.testing.assert_close(BY_NAME["surrogate"](inputs, PLAIN).loss_N, torch.tensor([-2.0, 1.5]))
    expected = torch.tensor([-(math.log(2) - 1), 3 * (math.log(0.5) - 1)])
    torch.testing.assert_close(BY_NAME["reinforce"](inputs, PLAIN).loss_N, expected)


@pytest.mark.parametrize("name", BY_NAME)
def test_losses_on_policy_have_the_policy_gradient(name) -> None:
    """At ratio one every loss has gradient minus advantage."""
    at, advantages = torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -1.5])
    rows = torch.tensor([0, 1])
    made = gradient(lambda x: BY_NAME[name](LossInputs.of(x, at, advantages, rows), PLAIN).loss_N.sum(), at)
    torch.testing.assert_close(made, -advantages)


@pytest.mark.parametrize("name", ["ppo_clip", "sapo", "surrogate", "reinforce"])
@pytest.mark.parametrize("dual_clip", [None, 2.0])
def test_loss_gradient_equals_finite_differences(name, dual_clip) -> None:
    """Also where a clip has taken it."""
    logprobs, proximal, advantages = random_tokens()
    config = AlgorithmConfig(clip_low=0.2, clip_high=0.3, dual_clip=dual_clip)
    weight_N = torch.rand(len(ROWS), dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss(x):
        return (BY_NAME[name](LossInputs.of(x, proximal, advantages, ROWS), config).loss_N * weight_N).sum()

    torch.testing.assert_close(
        gradient(loss, logprobs), finite_difference(loss, logprobs), atol=1e-7, rtol=1e-6
    )


def test_gspo_gradient_is_that_of_the_objective_for_whole_rows() -> None:
    """Mean over rows of max(-A s, -A clip(s)), s the geometric mean: equation 5 of the paper, by finite differences."""
    logprobs, proximal, _ = random_tokens()
    of_rows = torch.tensor([1.0, -1.0, 0.5, -2.0], dtype=torch.float64)
    config = AlgorithmConfig(policy_loss="gspo", clip_low=0.2, clip_high=0.3)
    lengths = torch.tensor([3, 2, 1, 4], dtype=torch.float64)

    def objective(x):
        mean_R = torch.zeros(4, dtype=torch.float64).index_add(0, ROWS, x - proximal) / lengths
        s_R = mean_R.exp()
        return torch.maximum(-of_rows * s_R, -of_rows * s_R.clamp(0.8, 1.3)).mean()

    def loss(x):
        inputs = LossInputs.of(x, proximal, of_rows[ROWS], ROWS)
        return (BY_NAME["gspo"](inputs, config).loss_N / (4 * lengths[ROWS])).sum()

    torch.testing.assert_close(
        gradient(loss, logprobs), finite_difference(objective, logprobs), atol=1e-7, rtol=1e-6
    )
    torch.testing.assert_close(loss(logprobs), objective(logprobs))


def test_cispo_gradient_is_that_of_the_logprob_under_a_fixed_weight() -> None:
    """The weight is a constant of the finite differences."""
    logprobs, proximal, advantages = random_tokens()
    weight_N = (logprobs - proximal).exp().clamp(0.8, 1.3)
    made = gradient(
        lambda x: BY_NAME["cispo"](LossInputs.of(x, proximal, advantages, ROWS), PLAIN).loss_N.sum(), logprobs
    )
    numeric = finite_difference(lambda x: (-weight_N * advantages * x).sum(), logprobs)
    torch.testing.assert_close(made, numeric, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_losses_do_not_see_masked_tokens(name, bad) -> None:
    """NaN and infinity at masked places: the others' loss and gradient are as without them, theirs are 0."""
    logprobs, proximal, advantages = random_tokens()
    mask = torch.tensor([True, False, True, True, True, False, True, True, True, False])
    spoilt = [
        torch.where(mask, each, torch.full_like(each, bad)) for each in (logprobs, proximal, advantages)
    ]
    config = AlgorithmConfig()

    def loss(x, old, gain):
        return BY_NAME[name](LossInputs.of(x, old, gain, ROWS, mask), config).loss_N.sum()

    plain = gradient(lambda x: loss(x, proximal, advantages), logprobs)
    made = gradient(lambda x: loss(x, spoilt[1], spoilt[2]), spoilt[0])
    assert torch.equal(made, plain)
    assert made[~mask].abs().max() == 0
    assert torch.equal(loss(*spoilt), loss(logprobs, proximal, advantages))
