"""Policy losses per token, and the weights that sum them to one number.

The loss of a batch is `sum_t weight_t * loss_t` with weights that are fixed before the first micro-batch, so that
cutting a batch into micro-batches changes nothing.

Shapes: N tokens (the completion tokens of all rows, row after row), R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.corrections import truncated_importance_weight

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """Loss of each token, its importance ratio, and whether the clip took its gradient."""

    loss_N: Tensor
    ratio_N: Tensor
    clipped_N: Tensor


def importance_ratio(trainer_logprobs_N: Tensor, rollout_logprobs_N: Tensor) -> Tensor:
    """Return exp(trainer - rollout), the difference cut at 20 nats so that it cannot overflow."""
    return (trainer_logprobs_N - rollout_logprobs_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def ppo_clip(
    trainer_logprobs_N: Tensor, rollout_logprobs_N: Tensor, advantages_N: Tensor, config: AlgorithmConfig
) -> PolicyLoss:
    """Return the clipped surrogate; the rollout's logprobs are the behaviour policy.

    Source: PPO (arXiv:1707.06347), equation 7; separate bounds: DAPO (arXiv:2503.14476), section 3.1; `dual_clip`:
    arXiv:1912.09729, equation 5.
    """
    ratio_N = importance_ratio(trainer_logprobs_N, rollout_logprobs_N)
    plain_N = -advantages_N * ratio_N
    bounded_N = -advantages_N * ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_N = torch.maximum(plain_N, bounded_N)
    clipped_N = bounded_N > plain_N
    if config.dual_clip is not None:
        ceiling_N = -advantages_N * config.dual_clip
        too_large_N = (advantages_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(too_large_N, ceiling_N, loss_N)
        clipped_N = clipped_N | too_large_N
    return PolicyLoss(loss_N, ratio_N.detach(), clipped_N)


def truncated_is(
    trainer_logprobs_N: Tensor, rollout_logprobs_N: Tensor, advantages_N: Tensor, config: AlgorithmConfig
) -> PolicyLoss:
    """Return -weight * advantage * logprob, the weight being the truncated importance ratio without gradient.

    Source: see `relax.algorithms.corrections.truncated_importance_weight`.
    """
    ratio_N = importance_ratio(trainer_logprobs_N.detach(), rollout_logprobs_N)
    weight_N = truncated_importance_weight(ratio_N, config.importance_cap)
    return PolicyLoss(-weight_N * advantages_N * trainer_logprobs_N, ratio_N, ratio_N > config.importance_cap)


BY_NAME = {"ppo_clip": ppo_clip, "truncated_is": truncated_is}


def token_weights(num_tokens_R: Tensor, reduction: str) -> Tensor:
    """Return the weight of every token of a batch (N), given the tokens of each row.

    `token_mean`: DAPO (arXiv:2503.14476), section 3.3. `sequence_mean`: GRPO (arXiv:2402.03300), equation 3.
    `sequence_sum`: Dr. GRPO (arXiv:2503.20783), section 3.2, with the constant length left to the learning rate.
    """
    num_rows = len(num_tokens_R)
    if reduction == "token_mean":
        weight_R = torch.full((num_rows,), 1.0 / float(num_tokens_R.sum()))
    elif reduction == "sequence_mean":
        weight_R = 1.0 / (num_rows * num_tokens_R.float())
    elif reduction == "sequence_sum":
        weight_R = torch.full((num_rows,), 1.0 / num_rows)
    else:
        raise ValueError(
            f"token_weights: reduction must be token_mean, sequence_mean or sequence_sum, got {reduction!r}"
        )
    return weight_R.repeat_interleave(num_tokens_R)
