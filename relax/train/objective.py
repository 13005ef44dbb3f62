"""From logprobs to the loss of a micro-batch, and from a step's tokens to its metrics. No model, no optimizer.

    rewards -> credit (advantages, returns)               whole batch, `Targets`
    logprobs -> policy loss * correction - entropy bonus + reference penalty + value loss
             -> times the token's weight, summed          micro-batch, `StepTokens.loss_of`

The parts are chosen by `AlgorithmConfig` and are pure functions of `relax.algorithms`. A micro-batch holds whole rows.

Shapes: C completion tokens of the batch, N of a micro-batch, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from relax.algorithms import kl, losses, ratios
from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.corrections import correct, truncated_weight
from relax.algorithms.credit import Outcome, assign_credit, whitened
from relax.algorithms.inputs import LossInputs
from relax.algorithms.m2po import second_moment_mask
from relax.algorithms.reduction import BatchTotals, token_weights
from relax.algorithms.reinforce import reinforce
from relax.algorithms.value_loss import value_loss
from relax.algorithms.whitening import AllSum
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
    rewards_R: Tensor
    groups_R: Tensor
    temperature: float
    returns_C: Tensor | None = None
    """What the critic learns; None without one."""
    stale_C: Tensor | None = None
    """Tokens older than the staleness bound allows; None when there are none."""
    stale_policy: str = "mask"
    loss_mask_C: Tensor | None = None
    """Tokens that the loss looks at; None: all."""

    @classmethod
    def from_batch(
        cls, batch: TrainBatch, algorithm: AlgorithmConfig, totals: BatchTotals | None = None
    ) -> Targets:
        """Return the targets; their advantages are those given, or zeros where `credited` must come first.

        Args:
            batch: Whole groups.
            algorithm: The parts of the loss.
            totals: Rows and tokens of all ranks' parts of the batch; None: this is all of it.
        """
        num_tokens_R = torch.from_numpy(np.array([len(tokens) for tokens in batch.completion_token_ids]))
        row_C = torch.arange(len(num_tokens_R)).repeat_interleave(num_tokens_R)
        starts_R = num_tokens_R.cumsum(0) - num_tokens_R
        stale_C = _stale(batch)
        rollout_C = torch.from_numpy(np.concatenate(batch.rollout_logprobs).astype(np.float32))
        targets = cls(
            token_ids_C=torch.from_numpy(np.concatenate(batch.completion_token_ids).astype(np.int64)),
            rollout_logprobs_C=rollout_C,
            advantages_C=torch.zeros_like(rollout_C),
            weight_C=token_weights(num_tokens_R, algorithm.reduction, algorithm.sequence_norm_tokens, totals),
            row_C=row_C,
            offset_C=torch.arange(len(row_C)) - starts_R[row_C],
            num_tokens_R=num_tokens_R,
            rewards_R=torch.from_numpy(np.array(batch.rewards, np.float32)),
            groups_R=torch.from_numpy(np.array(batch.groups, np.int64)),
            temperature=batch.temperature,
            stale_C=stale_C,
            stale_policy=batch.stale_policy,
            loss_mask_C=~stale_C if stale_C is not None and batch.stale_policy == "mask" else None,
        )
        raw = batch.given.raw_advantages
        if raw is not None:
            return replace(targets, advantages_C=whitened(per_token(raw), algorithm))
        return targets if algorithm.has_late_credit else targets.credited(algorithm)

    def credited(
        self,
        algorithm: AlgorithmConfig,
        *,
        ref_logprobs_C: Tensor | None = None,
        values_C: Tensor | None = None,
        all_sum: AllSum | None = None,
    ) -> Targets:
        """Return the targets with the advantages (and returns) that these scores give.

        Args:
            algorithm: The parts of the loss.
            ref_logprobs_C: Under the reference; needed with a penalty in the reward.
            values_C: Of the critic before the step; needed by `gae`.
            all_sum: Adds up a tensor over data-parallel ranks; None: one rank.
        """
        outcome = Outcome(
            rewards_R=self.rewards_R,
            groups_R=self.groups_R,
            num_tokens_R=self.num_tokens_R,
            row_C=self.row_C,
            rollout_logprobs_C=self.rollout_logprobs_C,
            ref_logprobs_C=ref_logprobs_C,
            values_C=values_C,
        )
        credit = assign_credit(outcome, algorithm, all_sum)
        return replace(self, advantages_C=credit.advantages_C, returns_C=credit.returns_C)

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
    """exp(trainer - rollout logprob)."""
    clipped_C: Tensor = field(init=False)
    weight_C: Tensor = field(init=False)
    """Correction's weight; 0 for rejected tokens."""
    values_C: Tensor = field(init=False)
    ref_logprobs_C: Tensor | None = None
    """Under the model that training started from; None when no penalty needs them."""
    proximal_logprobs_C: Tensor | None = None
    """Under the trainer's weights before the step; None: taken from the micro-batch itself, which is the same while a
    batch makes one optimizer step."""
    old_values_C: Tensor | None = None
    """The critic's before the step; needed where there is one."""
    learns_values: bool = True
    """Whether the critic, if there is one, learns here."""
    counts_C: Tensor | None = None
    """Tokens that the bound on the whole batch's second moment lets count; None: all."""
    loss: float = 0.0
    value_loss: float = 0.0

    def __post_init__(self) -> None:
        shape = self.targets.rollout_logprobs_C
        self.trainer_logprobs_C, self.entropy_C = torch.zeros_like(shape), torch.zeros_like(shape)
        self.ratio_C, self.clipped_C = torch.zeros_like(shape), torch.zeros_like(shape)
        self.weight_C, self.values_C = torch.zeros_like(shape), torch.zeros_like(shape)

    def bound_second_moment(self, budget: float, gather: Callable[[Tensor], Tensor] | None = None) -> None:
        """Choose the tokens that count by M2PO; `proximal_logprobs_C` must be there, for the whole batch.

        `gather` joins a tensor with those of the other data-parallel ranks; None: one rank.
        """
        if self.proximal_logprobs_C is None:
            raise ValueError("bound_second_moment: proximal_logprobs_C must be there, got none")
        mask_C = self.targets.loss_mask_C
        log_ratio_C = ratios.log_ratio(self.proximal_logprobs_C, self.targets.rollout_logprobs_C, mask_C)
        here_M = log_ratio_C if mask_C is None else log_ratio_C[mask_C]
        self.counts_C = second_moment_mask(log_ratio_C, budget, mask_C, gather(here_M) if gather else None)

    def loss_of(
        self,
        logprobs_N: Tensor,
        entropy_N: Tensor,
        target_N: Tensor,
        algorithm: AlgorithmConfig,
        values_N: Tensor | None = None,
    ) -> Tensor:
        """Return the micro-batch's part of the loss from logprobs, entropies and values; record what was seen."""
        targets = self.targets
        rollout_N = targets.rollout_logprobs_C[target_N]
        mask_N = None if targets.loss_mask_C is None else targets.loss_mask_C[target_N]
        loss_N = self._policy_loss(logprobs_N, target_N, algorithm, mask_N)
        loss_N = loss_N - algorithm.entropy_coef * entropy_N
        if self.ref_logprobs_C is not None and algorithm.kl_placement == "loss":
            loss_N = loss_N + algorithm.kl_coef * kl.reference_penalty(
                logprobs_N,
                self.ref_logprobs_C[target_N],
                rollout_N,
                algorithm.kl_estimator,
                algorithm.kl_cap,
                mask_N,
            )
        if values_N is not None:
            value_loss_N = self._value_loss(values_N, target_N, algorithm, mask_N)
            loss_N = loss_N + algorithm.critic.value_coef * value_loss_N
        if mask_N is not None:
            loss_N = loss_N.masked_fill(~mask_N, 0.0)
        loss = (loss_N * targets.weight_C[target_N]).sum()
        self.trainer_logprobs_C[target_N] = logprobs_N.detach()
        self.entropy_C[target_N] = entropy_N.detach()
        self.ratio_C[target_N] = ratios.ratio(logprobs_N.detach() - rollout_N)
        self.loss += float(loss.detach())
        return loss

    def _policy_loss(
        self, logprobs_N: Tensor, target_N: Tensor, algorithm: AlgorithmConfig, mask_N: Tensor | None
    ) -> Tensor:
        """Return the corrected policy loss, that of stale tokens replaced by a truncated importance-weighted one if so
        asked."""
        targets = self.targets
        rollout_N, row_N = targets.rollout_logprobs_C[target_N], targets.row_C[target_N]
        advantages_N = targets.advantages_C[target_N]
        before_N = logprobs_N.detach()
        if self.proximal_logprobs_C is not None:
            before_N = self.proximal_logprobs_C[target_N]
        proximal_N = before_N if algorithm.proximal == "trainer" else rollout_N
        inputs = LossInputs.of(logprobs_N, proximal_N, advantages_N, row_N, mask_N)
        policy = losses.BY_NAME[algorithm.policy_loss](inputs, algorithm)
        correction = correct(before_N, rollout_N, advantages_N, row_N, algorithm.correction, mask_N)
        counts_N = (
            correction.counts_N if self.counts_C is None else correction.counts_N & self.counts_C[target_N]
        )
        loss_N = (policy.loss_N * correction.weight_N).masked_fill(~counts_N, 0.0)
        self.clipped_C[target_N] = policy.clipped_N.float()
        self.weight_C[target_N] = correction.weight_N.masked_fill(~counts_N, 0.0)
        if targets.stale_C is None or targets.stale_policy != "reweight":
            return loss_N
        weight_N = truncated_weight(ratios.ratio(before_N - rollout_N), 0.0, algorithm.correction.weight_high)
        stale_loss_N = weight_N * reinforce(inputs, algorithm).loss_N
        return torch.where(targets.stale_C[target_N], stale_loss_N, loss_N)

    def _value_loss(
        self, values_N: Tensor, target_N: Tensor, algorithm: AlgorithmConfig, mask_N: Tensor | None
    ) -> Tensor:
        targets = self.targets
        if self.old_values_C is None or targets.returns_C is None:
            raise ValueError("loss_of: old values and returns must be there with values, got none")
        loss_N = value_loss(
            values_N,
            self.old_values_C[target_N],
            targets.returns_C[target_N],
            algorithm.critic.value_clip,
            mask_N,
        )
        self.values_C[target_N] = values_N.detach()
        self.value_loss += float((loss_N.detach() * targets.weight_C[target_N]).sum())
        return loss_N

    def metrics(self) -> dict[str, float]:
        """Return means over the step's tokens and rows."""
        targets = self.targets
        rollout_C, trainer_C = targets.rollout_logprobs_C, self.trainer_logprobs_C
        difference_C = (trainer_C - rollout_C).abs()
        values = {
            "entropy_nats": self.entropy_C.mean(),
            "clip_fraction": self.clipped_C.mean(),
            "importance_ratio": self.ratio_C.mean(),
            "correction_weight": self.weight_C.mean(),
            "correction_zero_fraction": (self.weight_C == 0).float().mean(),
            "kl_rollout_trainer_nats": kl.k3(rollout_C, trainer_C).mean(),
            "logprob_difference_mean_nats": difference_C.mean(),
            "logprob_difference_max_nats": difference_C.max(),
            "logprob_difference_square_nats2": difference_C.square().mean(),
            "advantage_mean": targets.advantages_C.mean(),
            "advantage_std": targets.advantages_C.std(unbiased=False),
            "advantage_max": targets.advantages_C.abs().max(),
            "reward_mean": targets.rewards_R.mean(),
            "reward_std": targets.rewards_R.std(unbiased=False),
            "num_completion_tokens": targets.num_tokens_R.sum(),
        }
        if targets.stale_C is not None:
            values["stale_token_fraction"] = targets.stale_C.float().mean()
        if self.ref_logprobs_C is not None:
            values["kl_reference_nats"] = kl.k3(trainer_C, self.ref_logprobs_C).mean()
        if targets.returns_C is not None and self.learns_values:
            values |= self._critic_metrics(targets.returns_C)
        return {"loss": self.loss} | {name: float(value) for name, value in values.items()}

    def _critic_metrics(self, returns_C: Tensor) -> dict[str, Tensor]:
        """Return how good the values were; 1 of explained variance is perfect, 0 is as good as a constant."""
        left = (returns_C - self.values_C).var(unbiased=False)
        spread = returns_C.var(unbiased=False)
        return {
            "value_loss": torch.tensor(self.value_loss),
            "value_mean": self.values_C.mean(),
            "return_mean": returns_C.mean(),
            "value_explained_variance": 1 - left / spread.clamp(min=1e-8),
        }


def per_token(rows: Sequence[np.ndarray]) -> Tensor:
    """Return one float32 array for each row as values [C] of all completion tokens."""
    return torch.from_numpy(np.concatenate(rows).astype(np.float32))


def _stale(batch: TrainBatch) -> Tensor | None:
    if batch.stale_tokens is None:
        return None
    stale_C = torch.from_numpy(np.concatenate(batch.stale_tokens).astype(bool))
    return stale_C if bool(stale_C.any()) else None
