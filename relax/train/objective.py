"""From logits to the loss of a micro-batch, and from a step's tokens to its metrics. No model, no optimizer.

Shapes: C completion tokens of the batch, N of a micro-batch, R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from relax.algorithms import advantages, kl, losses
from relax.algorithms.config import AlgorithmConfig
from relax.train.batch import TrainBatch


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The batch's completion tokens and what the loss needs of each, row after row."""

    token_ids_C: Tensor
    rollout_logprobs_C: Tensor
    advantages_C: Tensor
    weight_C: Tensor
    row_C: Tensor
    offset_C: Tensor
    """Place of the token in its completion, from 0."""
    num_tokens_R: Tensor
    advantages_R: Tensor
    rewards_R: Tensor
    temperature: float
    stale_C: Tensor | None = None
    """Tokens older than the staleness bound allows; None when there are none."""
    stale_policy: str = "mask"

    @classmethod
    def from_batch(cls, batch: TrainBatch, algorithm: AlgorithmConfig) -> Targets:
        num_tokens = np.array([len(tokens) for tokens in batch.completion_token_ids])
        num_tokens_R = torch.from_numpy(num_tokens)
        rewards_R = torch.from_numpy(np.array(batch.rewards, np.float32))
        groups_R = torch.from_numpy(np.array(batch.groups, np.int64))
        advantages_R = advantages.BY_NAME[algorithm.advantage](rewards_R, groups_R)
        row_C = torch.arange(len(num_tokens)).repeat_interleave(num_tokens_R)
        starts_R = num_tokens_R.cumsum(0) - num_tokens_R
        return cls(
            token_ids_C=torch.from_numpy(np.concatenate(batch.completion_token_ids).astype(np.int64)),
            rollout_logprobs_C=torch.from_numpy(np.concatenate(batch.rollout_logprobs).astype(np.float32)),
            advantages_C=advantages_R[row_C],
            weight_C=losses.token_weights(num_tokens_R, algorithm.reduction),
            row_C=row_C,
            offset_C=torch.arange(len(row_C)) - starts_R[row_C],
            num_tokens_R=num_tokens_R,
            advantages_R=advantages_R,
            rewards_R=rewards_R,
            temperature=batch.temperature,
            stale_C=_stale(batch),
            stale_policy=batch.stale_policy,
        )

    def by_row(self, values_C: Tensor) -> list[np.ndarray]:
        """Return per-token values as one array for each row."""
        return [part.numpy() for part in values_C.split(self.num_tokens_R.tolist())]

    def row_means(self, values_C: Tensor) -> Tensor:
        """Return the mean over each row's tokens, [R]."""
        total_R = torch.zeros(len(self.num_tokens_R)).index_add(0, self.row_C, values_C)
        return total_R / self.num_tokens_R


@dataclass(kw_only=True)
class StepTokens:
    """What a step saw of each completion token, filled micro-batch by micro-batch."""

    targets: Targets
    trainer_logprobs_C: Tensor = field(init=False)
    entropy_C: Tensor = field(init=False)
    ratio_C: Tensor = field(init=False)
    clipped_C: Tensor = field(init=False)
    ref_logprobs_C: Tensor | None = None
    """Under the model that training started from; None when no penalty needs them."""
    loss: float = 0.0

    def __post_init__(self) -> None:
        shape = self.targets.rollout_logprobs_C
        self.trainer_logprobs_C, self.entropy_C = torch.zeros_like(shape), torch.zeros_like(shape)
        self.ratio_C, self.clipped_C = torch.zeros_like(shape), torch.zeros_like(shape)

    def micro_loss(self, logits_NV: Tensor, target_N: Tensor, algorithm: AlgorithmConfig) -> Tensor:
        """Return the micro-batch's part of the batch's loss; record what was seen."""
        targets = self.targets
        scaled_NV = logits_NV if targets.temperature == 1.0 else logits_NV / targets.temperature
        log_probs_NV = scaled_NV.log_softmax(-1)
        logprobs_N = log_probs_NV.gather(1, targets.token_ids_C[target_N][:, None])[:, 0]
        with torch.set_grad_enabled(algorithm.entropy_coef > 0 and torch.is_grad_enabled()):
            entropy_N = -(log_probs_NV.exp() * log_probs_NV).sum(-1)
        policy = losses.BY_NAME[algorithm.policy_loss](
            logprobs_N, targets.rollout_logprobs_C[target_N], targets.advantages_C[target_N], algorithm
        )
        loss_N = self._policy_loss(policy.loss_N, logprobs_N, target_N, algorithm)
        loss_N = loss_N - algorithm.entropy_coef * entropy_N
        if self.ref_logprobs_C is not None:
            penalty_N = kl.reference_penalty(logprobs_N, self.ref_logprobs_C[target_N], algorithm.kl_cap)
            loss_N = loss_N + algorithm.kl_coef * penalty_N
        if targets.stale_C is not None and targets.stale_policy == "mask":
            loss_N = loss_N.masked_fill(targets.stale_C[target_N], 0.0)
        loss = (loss_N * targets.weight_C[target_N]).sum()
        self.trainer_logprobs_C[target_N] = logprobs_N.detach()
        self.entropy_C[target_N] = entropy_N.detach()
        self.ratio_C[target_N] = policy.ratio_N
        self.clipped_C[target_N] = policy.clipped_N.float()
        self.loss += float(loss.detach())
        return loss

    def _policy_loss(
        self, loss_N: Tensor, logprobs_N: Tensor, target_N: Tensor, algorithm: AlgorithmConfig
    ) -> Tensor:
        """Return the policy loss, that of stale tokens replaced by a truncated importance-weighted one if so asked."""
        targets = self.targets
        if targets.stale_C is None or targets.stale_policy != "reweight":
            return loss_N
        rollout_N, advantages_N = targets.rollout_logprobs_C[target_N], targets.advantages_C[target_N]
        stale_loss_N = losses.truncated_is(logprobs_N, rollout_N, advantages_N, algorithm).loss_N
        return torch.where(targets.stale_C[target_N], stale_loss_N, loss_N)

    def metrics(self) -> dict[str, float]:
        """Return means over the step's tokens and rows."""
        targets = self.targets
        rollout_C, trainer_C = targets.rollout_logprobs_C, self.trainer_logprobs_C
        difference_C = (trainer_C - rollout_C).abs()
        values = {
            "entropy_nats": self.entropy_C.mean(),
            "clip_fraction": self.clipped_C.mean(),
            "importance_ratio": self.ratio_C.mean(),
            "kl_rollout_trainer_nats": kl.k3(rollout_C, trainer_C).mean(),
            "logprob_difference_mean_nats": difference_C.mean(),
            "logprob_difference_max_nats": difference_C.max(),
            "advantage_mean": targets.advantages_R.mean(),
            "advantage_std": targets.advantages_R.std(unbiased=False),
            "advantage_max": targets.advantages_R.abs().max(),
            "reward_mean": targets.rewards_R.mean(),
            "reward_std": targets.rewards_R.std(unbiased=False),
            "num_completion_tokens": targets.num_tokens_R.sum(),
        }
        if targets.stale_C is not None:
            values["stale_token_fraction"] = targets.stale_C.float().mean()
        if self.ref_logprobs_C is not None:
            values["kl_reference_nats"] = kl.k3(trainer_C, self.ref_logprobs_C).mean()
        return {"loss": self.loss} | {name: float(value) for name, value in values.items()}


def _stale(batch: TrainBatch) -> Tensor | None:
    if batch.stale_tokens is None:
        return None
    stale_C = torch.from_numpy(np.concatenate(batch.stale_tokens).astype(bool))
    return stale_C if bool(stale_C.any()) else None
