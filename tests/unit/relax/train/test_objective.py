"""The loss of stale tokens: none under `mask`, a truncated importance-weighted one under `reweight`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from relax.algorithms.config import AlgorithmConfig
from relax.errors import TrainingError
from relax.models.inputs import PromptInputs
from relax.train.batch import TrainBatch, check_batch
from relax.train.objective import StepTokens, Targets

TOKENS = [np.array([0, 1], np.int32), np.array([2, 3], np.int32)]
STALE = [np.array([True, False]), np.array([False, False])]
ALGORITHM = AlgorithmConfig(entropy_coef=0.0)


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
    logits = torch.zeros(4, 4, requires_grad=True)
    StepTokens(targets=Targets.from_batch(batch, algorithm)).micro_loss(
        logits, torch.arange(4), algorithm
    ).backward()
    return logits.grad


def test_masked_stale_token_has_no_gradient():
    """Its row of the gradient is zero, also that of penalties; the others are as they were."""
    algorithm = AlgorithmConfig(policy_loss="truncated_is", entropy_coef=0.1)
    plain = gradient(make_batch(), algorithm)
    masked = gradient(make_batch(stale_tokens=STALE, stale_policy="mask"), algorithm)
    assert plain[0].abs().max() > 0
    assert masked[0].abs().max() == 0
    torch.testing.assert_close(masked[1:], plain[1:])


def test_reweighted_stale_token_keeps_a_truncated_gradient():
    """The ratio is far above the clip, so PPO has no gradient for a good token; the stale one has that of the cap."""
    plain = gradient(make_batch())
    reweighted = gradient(make_batch(stale_tokens=STALE, stale_policy="reweight"))
    by_hand = gradient(make_batch(), AlgorithmConfig(policy_loss="truncated_is"))
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
