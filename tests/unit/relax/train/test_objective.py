"""The loss of a micro-batch: stale tokens, masks, parts of a batch, and how the parts of an algorithm combine."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.reduction import BatchTotals
from relax.algorithms.sections import CorrectionConfig
from relax.errors import TrainingError
from relax.models.inputs import PromptInputs
from relax.train.batch import TrainBatch, check_batch
from relax.train.objective import StepTokens, Targets
from relax.train.vocabulary import token_scores

TOKENS = [np.array([0, 1], np.int32), np.array([2, 3], np.int32)]
STALE = [np.array([True, False]), np.array([False, False])]
ALGORITHM = AlgorithmConfig(entropy_coef=0.0)
TRUNCATE = CorrectionConfig(weight="truncate")


def make_batch(**changes) -> TrainBatch:
    """Return one group of two rows of two tokens, which the rollout thought far less likely than the trainer does."""
    values = {
        "prompts": [PromptInputs(token_ids=np.array([0], np.int32))],
        "groups": np.zeros(2, np.int32),
        "completion_token_ids": TOKENS,
        "rollout_logprobs": [np.full(2, -3.0, np.float32)] * 2,
        "routed_experts": [None, None],
        "rewards": np.array([1.0, 0.0], np.float32),
    }
    return TrainBatch(**values | changes)


def gradient(batch: TrainBatch, algorithm: AlgorithmConfig = ALGORITHM) -> torch.Tensor:
    """Return the gradient of the batch's loss with respect to equal logits, [tokens, vocabulary]."""
    return _gradient_of(batch, algorithm, torch.zeros(4, 4), None)


def test_masked_stale_token_has_no_gradient():
    """Its row of the gradient is zero, also that of penalties; the others are as they were."""
    algorithm = AlgorithmConfig(policy_loss="cispo", clip_low=1.0, entropy_coef=0.1)
    plain = gradient(make_batch(), algorithm)
    masked = gradient(make_batch(stale_tokens=STALE, stale_policy="mask"), algorithm)
    assert plain[0].abs().max() > 0
    assert masked[0].abs().max() == 0
    torch.testing.assert_close(masked[1:], plain[1:])


def test_reweighted_stale_token_keeps_a_truncated_gradient():
    """The ratio is far above the clip, so PPO has no gradient for a good token; the stale one has that of the cap."""
    plain = gradient(make_batch())
    reweighted = gradient(make_batch(stale_tokens=STALE, stale_policy="reweight"))
    by_hand = gradient(make_batch(), AlgorithmConfig(policy_loss="reinforce", correction=TRUNCATE))
    assert plain[0].abs().max() == 0
    assert reweighted[0].abs().max() > 0
    torch.testing.assert_close(reweighted[0], by_hand[0])
    torch.testing.assert_close(reweighted[1:], plain[1:])


def test_stale_share_is_a_metric_only_where_there_are_stale_tokens():
    """One token of four; none when the marks are all false."""
    tokens = StepTokens(targets=Targets.from_batch(make_batch(stale_tokens=STALE), ALGORITHM))
    assert tokens.metrics()["stale_token_fraction"] == 0.25
    fresh = [np.zeros(2, bool)] * 2
    tokens = StepTokens(targets=Targets.from_batch(make_batch(stale_tokens=fresh), ALGORITHM))
    assert "stale_token_fraction" not in tokens.metrics()


def test_marks_that_do_not_fit_are_refused():
    """One mark for each token."""
    with pytest.raises(TrainingError) as caught:
        check_batch(make_batch(stale_tokens=[STALE[0], STALE[1][:1]]), 4, None)
    assert str(caught.value) == "batch row 1: stale_tokens must be one for each of 2 tokens, got 1"


def test_masked_token_may_hold_anything():
    """NaN logits and a NaN behaviour logprob at the stale token: loss and gradient are finite, and 0 there."""
    algorithm = AlgorithmConfig(entropy_coef=0.1, kl_coef=0.1)
    targets = Targets.from_batch(make_batch(stale_tokens=STALE), algorithm)
    targets.rollout_logprobs_C[0] = float("nan")
    reference = torch.tensor([float("nan"), -1.0, -1.0, -1.0])
    logits = torch.zeros(4, 4)
    logits[0] = float("nan")
    logits.requires_grad_()
    loss = _loss(StepTokens(targets=targets, ref_logprobs_C=reference), logits, algorithm)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0].abs().max() == 0
    assert logits.grad[1].abs().max() > 0


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sequence_sum"])
def test_ranks_with_the_totals_of_the_batch_add_up_to_one_process(reduction):
    """Two ranks of a group each, of unlike lengths: their gradients are the rows of the whole batch's."""
    algorithm = AlgorithmConfig(advantage="dr_grpo", reduction=reduction, entropy_coef=0.1)
    lengths = (1, 3, 2, 2)
    whole = _batch_of(lengths)
    totals = BatchTotals(num_rows=4, num_tokens=8)
    parts = [(_batch_of(lengths[:2]), 4), (_batch_of(lengths[2:]), 4)]
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    expected = _gradient_of(whole, algorithm, logits, None)
    made = torch.cat(
        [
            _gradient_of(part, algorithm, logits[4 * index : 4 * index + num], totals)
            for index, (part, num) in enumerate(parts)
        ]
    )
    torch.testing.assert_close(made, expected)


def test_decoupled_loss_is_the_clip_around_the_trainer_under_a_weight_from_the_rollout():
    """Ratios 1.5 (clipped at 1.2) and 0.9 to the proximal policy, weights 2 (cut from 4) and 0.5."""
    algorithm = AlgorithmConfig(
        proximal="trainer", correction=TRUNCATE, advantage="dr_grpo", reduction="sequence_sum"
    )
    batch = _batch_of((1, 1))
    targets = Targets.from_batch(batch, algorithm)
    now = torch.tensor([1.5 * 0.2, 0.9 * 0.4]).log()
    proximal = torch.tensor([0.2, 0.4]).log()
    targets.rollout_logprobs_C[:] = torch.tensor([0.05, 0.8]).log()
    tokens = StepTokens(targets=targets, proximal_logprobs_C=proximal)
    loss = tokens.loss_of(now, torch.zeros(2), torch.arange(2), algorithm)
    assert float(loss) == pytest.approx((-0.5 * 1.2 * 2.0 + 0.5 * 0.9 * 0.5) / 2)
    assert tokens.metrics()["correction_weight"] == pytest.approx(1.25)
    assert tokens.metrics()["clip_fraction"] == 0.5


def test_penalty_counts_once_wherever_it_is():
    """In the loss it is a term of the loss; in the reward it changes the advantages and is no term."""
    reference = torch.full((4,), -0.5)
    in_loss = AlgorithmConfig(kl_coef=1.0, advantage="dr_grpo")
    in_reward = AlgorithmConfig(kl_coef=1.0, advantage="dr_grpo", kl_placement="reward", kl_estimator="k1")
    logits, behaviour = torch.zeros(4, 4), [np.full(2, -math.log(4), np.float32)] * 2
    losses = []
    for algorithm in (in_loss, in_reward):
        targets = Targets.from_batch(make_batch(rollout_logprobs=behaviour), algorithm)
        if algorithm is in_reward:
            assert targets.advantages_C.abs().max() == 0
            targets = targets.credited(
                algorithm, ref_logprobs_C=reference * torch.tensor([1.0, 1.0, 2.0, 2.0])
            )
            # The rows pay -2.5 and -2 nats twice each: 1 + 5 and 0 + 4, of which half the difference is left.
            torch.testing.assert_close(targets.advantages_C, torch.tensor([1.0, 1.0, -1.0, -1.0]))
        tokens = StepTokens(targets=targets, ref_logprobs_C=reference)
        losses.append(float(_loss(tokens, logits, algorithm)))
        assert "kl_reference_nats" in tokens.metrics()
    assert losses[1] == pytest.approx(0.0, abs=1e-6)
    assert losses[0] > 0.1


def test_values_need_what_they_were_before():
    """The reason is said, not a broken sum."""
    algorithm = AlgorithmConfig(advantage="gae")
    tokens = StepTokens(targets=Targets.from_batch(make_batch(), algorithm))
    with pytest.raises(ValueError, match="old values and returns must be there with values, got none"):
        tokens.loss_of(torch.zeros(4), torch.zeros(4), torch.arange(4), algorithm, torch.zeros(4))
    with pytest.raises(ValueError, match="proximal_logprobs_C must be there, got none"):
        tokens.bound_second_moment(0.04)


def _batch_of(lengths: tuple[int, ...]) -> TrainBatch:
    """Return groups of two rows of these lengths, rewards 1 and 0 in each."""
    return make_batch(
        prompts=[PromptInputs(token_ids=np.array([0], np.int32))] * (len(lengths) // 2),
        groups=np.repeat(np.arange(len(lengths) // 2, dtype=np.int32), 2),
        completion_token_ids=[np.zeros(length, np.int32) for length in lengths],
        rollout_logprobs=[np.full(length, -1.0, np.float32) for length in lengths],
        routed_experts=[None] * len(lengths),
        rewards=np.array([1.0, 0.0] * (len(lengths) // 2), np.float32),
    )


def _gradient_of(
    batch: TrainBatch, algorithm: AlgorithmConfig, logits: torch.Tensor, totals: BatchTotals | None
) -> torch.Tensor:
    leaf = logits.clone().requires_grad_()
    targets = Targets.from_batch(batch, algorithm, totals)
    _loss(StepTokens(targets=targets), leaf, algorithm).backward()
    return leaf.grad


def _loss(tokens: StepTokens, logits: torch.Tensor, algorithm: AlgorithmConfig) -> torch.Tensor:
    """Return the loss of all tokens in one micro-batch."""
    targets = tokens.targets
    scores = token_scores(logits, targets.token_ids_C, counts_N=targets.loss_mask_C)
    return tokens.loss_of(*scores, torch.arange(len(logits)), algorithm)
