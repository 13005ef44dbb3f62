"""The trainer: one optimizer step for each batch of complete groups, and the weights out of it.

    check -> advantages -> towers once a prompt -> micro-batches (loss, backward) -> towers' backward
          -> clip -> AdamW -> metrics

It talks to no queue. A batch that cannot be trained on is refused before anything changes; a step whose loss or
gradient is not finite changes no weight, is counted, and says so in its metrics.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax.algorithms.config import AlgorithmConfig
from relax.models.snapshot import write_snapshot
from relax.train.batch import MicroBatch, TrainBatch, check_batch, plan_micro_batches
from relax.train.checkpoint import (
    read_checkpoint,
    read_tensors_beside,
    write_checkpoint,
    write_pretrained,
)
from relax.train.config import TrainerConfig, lr_multiplier
from relax.train.critic import Critic
from relax.train.objective import StepTokens, Targets
from relax.train.policy import OmniPolicy, PromptTable
from relax.train.runtime import start_parallel
from relax.train.scoring import score

CRITIC_FILE = "critic.safetensors"
"""File of a checkpoint with the value head and its optimizer."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step saw, under the weights before it."""

    metrics: dict[str, float]
    advantages: list[np.ndarray]
    """float32 [num_completion_tokens] for each row."""
    trainer_logprobs: list[np.ndarray]
    """float32 [num_completion_tokens] for each row, nats."""
    importance_ratio: np.ndarray
    """float32 [num_rows]: mean over the row's tokens of exp(trainer - rollout logprob)."""


class Trainer:
    """A policy and its optimizer.

    Attributes:
        policy: The model that is trained.
        critic: Its value head; None unless the advantages need one.
        num_steps: Optimizer steps that changed the weights.
        num_skipped_steps: Steps that did not, because the loss or the gradient was not finite.
    """

    def __init__(
        self, model_dir: Path | str, config: TrainerConfig, algorithm: AlgorithmConfig, *, seed: int
    ) -> None:
        self._model_dir = Path(model_dir)
        self._config = config
        self._algorithm = algorithm
        torch.set_num_threads(config.num_threads)
        start_parallel(seed)
        self.policy = OmniPolicy(
            self._model_dir, freeze_towers=config.freeze_towers, recompute=config.recompute
        )
        self._reference = self._load_reference() if algorithm.kl_coef else None
        self.optimizer = _optimizer(self.policy, config)
        hidden_size = self.policy.language_model.config.hidden_size
        self.critic = Critic(hidden_size, algorithm.critic) if algorithm.has_critic else None
        self.num_steps = 0
        self.num_skipped_steps = 0

    def train_step(self, batch: TrainBatch) -> StepResult:
        """Train one step on a batch. Blocks; changes the weights unless the metrics say `step_skipped`.

        Raises:
            TrainingError: the batch cannot be trained on; nothing has changed.
            relax.models.errors.PromptError: a prompt does not fit the model; nothing has changed.
        """
        started = time.perf_counter()
        routing = self.policy.routing_shape if self._config.routing_replay else None
        check_batch(batch, self.policy.vocab_size, routing)
        targets = Targets.from_batch(batch, self._algorithm)
        micro_batches = plan_micro_batches(
            batch,
            max_tokens=self._config.max_tokens_per_micro_batch,
            share_prompts=self._config.share_prompts,
            routing=routing,
        )
        planned = time.perf_counter()
        ref_logprobs_C = self._reference_logprobs(batch, targets, micro_batches)
        referred = time.perf_counter()
        prompts = self.policy.embed_prompts(batch.prompts)
        embedded = time.perf_counter()
        tokens = self._step_tokens(batch, prompts, targets, micro_batches, ref_logprobs_C)
        targets = tokens.targets
        scored = time.perf_counter()
        routing_metrics = self._accumulate(batch, prompts, tokens, micro_batches)
        accumulated = time.perf_counter()
        update_metrics = self._update(tokens.loss)
        done = time.perf_counter()
        metrics = tokens.metrics() | routing_metrics | update_metrics
        metrics |= {
            "num_rows": float(batch.num_rows),
            "num_micro_batches": float(len(micro_batches)),
            "num_sequence_tokens": float(sum((m.segment_BT >= 0).sum() for m in micro_batches)),
            "num_padded_tokens": float(sum(m.segment_BT.size for m in micro_batches)),
            "plan_s": planned - started,
            "reference_s": referred - planned,
            "embed_s": embedded - referred,
            "score_s": scored - embedded,
            "forward_backward_s": accumulated - scored,
            "optimizer_s": done - accumulated,
            "step_s": done - started,
        }
        return StepResult(
            metrics=metrics,
            advantages=targets.by_row(targets.advantages_C),
            trainer_logprobs=targets.by_row(tokens.trainer_logprobs_C),
            importance_ratio=targets.row_means(tokens.ratio_C).numpy(),
        )

    def publish(self, snapshot_dir: Path, policy_version: int) -> None:
        """Write the weights as a snapshot that appears whole or not at all."""
        write_snapshot(snapshot_dir, self.policy.checkpoint_tensors(), policy_version, durable=False)

    def save_pretrained(self, directory: Path) -> None:
        """Write a Hugging Face directory: the weights, and every other file of the model directory as it was."""
        write_pretrained(directory, self._model_dir, self.policy.checkpoint_tensors(), self.policy.files())

    def save_checkpoint(self, directory: Path) -> None:
        """Write a Megatron checkpoint from which `load_checkpoint` goes on exactly; replaces an older one there."""
        state = {"num_steps": self.num_steps, "num_skipped_steps": self.num_skipped_steps}
        beside = {} if self.critic is None else {CRITIC_FILE: self.critic.tensors()}
        write_checkpoint(directory, self.policy, self.optimizer, state, beside)

    def load_checkpoint(self, directory: Path) -> None:
        """Go on from a checkpoint: weights, optimizer, critic if there is one, step counts and random state.

        Raises:
            TrainingError: there is no checkpoint, or one of another model, or one without the critic.
        """
        if self.critic is not None:
            self.critic.load(read_tensors_beside(directory, CRITIC_FILE))
        state = read_checkpoint(directory, self.policy, self.optimizer)
        self.num_steps = state["num_steps"]
        self.num_skipped_steps = state["num_skipped_steps"]

    def _load_reference(self) -> OmniPolicy:
        """Return a frozen copy of the model that training starts from."""
        reference = OmniPolicy(self._model_dir, freeze_towers=True)
        return reference.requires_grad_(False).eval()

    @torch.no_grad()
    def _reference_logprobs(
        self, batch: TrainBatch, targets: Targets, micro_batches: list[MicroBatch]
    ) -> Tensor | None:
        """Return the reference's logprobs [C], under its own routing; None when there is no reference."""
        if self._reference is None:
            return None
        prompts = self._reference.embed_prompts(batch.prompts)
        position_C = _positions(batch, prompts, targets)
        logprobs_C = torch.zeros_like(targets.rollout_logprobs_C)
        for micro in micro_batches:
            logits_NV = self._reference.logits(prompts, targets.token_ids_C, position_C, micro)
            target_N = torch.from_numpy(micro.target_N)
            log_probs_NV = (logits_NV.float() / targets.temperature).log_softmax(-1)
            logprobs_C[target_N] = log_probs_NV.gather(1, targets.token_ids_C[target_N][:, None])[:, 0]
        return logprobs_C

    def _step_tokens(
        self,
        batch: TrainBatch,
        prompts: PromptTable,
        targets: Targets,
        micro_batches: list[MicroBatch],
        ref_logprobs_C: Tensor | None,
    ) -> StepTokens:
        """Return the step's tokens with the advantages, and with what needs the whole batch before the first loss."""
        algorithm = self._algorithm
        logprobs_C = values_C = None
        if algorithm.needs_scores:
            position_C = _positions(batch, prompts, targets)
            scores = score(self.policy, self.critic, prompts, targets, position_C, micro_batches)
            logprobs_C, values_C = scores.logprobs_C, scores.values_C
        if algorithm.has_late_credit:
            targets = targets.credited(algorithm, ref_logprobs_C=ref_logprobs_C, values_C=values_C)
        tokens = StepTokens(
            targets=targets,
            ref_logprobs_C=ref_logprobs_C,
            proximal_logprobs_C=logprobs_C,
            old_values_C=values_C,
        )
        if algorithm.correction.m2_budget is not None:
            tokens.bound_second_moment(algorithm.correction.m2_budget)
        return tokens

    def _accumulate(
        self, batch: TrainBatch, prompts: PromptTable, tokens: StepTokens, micro_batches: list[MicroBatch]
    ) -> dict[str, float]:
        """Run all micro-batches forward and backward; gradients add up in the parameters."""
        self._zero_gradients()
        targets = tokens.targets
        position_C = _positions(batch, prompts, targets)
        leaves = prompts.leaves()
        num_differing, num_counted = 0, 0
        for micro in micro_batches:
            with self.policy.replaying(micro) as session:
                hidden_NH = self.policy.predictors(leaves, targets.token_ids_C, position_C, micro)
                logits_NV = self.policy.language_model.logits(hidden_NH)
                values_N = None if self.critic is None else self.critic.values(hidden_NH)
                loss = tokens.micro_loss(
                    logits_NV, torch.from_numpy(micro.target_N), self._algorithm, values_N
                )
                session.begin_backward()
                loss.backward()
            differing, counted = session.count()
            num_differing, num_counted = num_differing + differing, num_counted + counted
        prompts.backward(leaves)
        return {"routing_mismatch": num_differing / num_counted} if num_counted else {}

    def _update(self, loss: float) -> dict[str, float]:
        """Clip and apply the gradients, or leave the weights alone when they are not finite."""
        norm = torch.nn.utils.get_total_norm(self._gradients())
        skipped = not (math.isfinite(loss) and bool(torch.isfinite(norm)))
        multiplier = lr_multiplier(self._config, self.num_steps + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = group["full_lr"] * multiplier
        if skipped:
            self.num_skipped_steps += 1
        else:
            if self._config.max_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self._parameters(), self._config.max_grad_norm, norm)
            self.optimizer.step()
            self.num_steps += 1
        critic = {} if self.critic is None else self.critic.update(multiplier, skip=skipped)
        rates = {group["name"]: group["lr"] for group in self.optimizer.param_groups}
        return {
            "grad_norm": float(norm),
            "lr": rates["language_model"],
            "tower_lr": rates.get("towers", 0.0),
            "step_skipped": float(skipped),
            "num_skipped_steps": float(self.num_skipped_steps),
            "num_steps": float(self.num_steps),
            **critic,
        }

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def _zero_gradients(self) -> None:
        """Set every gradient to zero; a tower without input in a step then gets a zero gradient, not none."""
        for parameter in self._parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch._foreach_zero_(self._gradients())
        if self.critic is not None:
            self.critic.forget_gradients()


def _positions(batch: TrainBatch, prompts: PromptTable, targets: Targets) -> Tensor:
    """Return the rotary position of each completion token, [C]."""
    groups_R = torch.from_numpy(np.array(batch.groups, np.int64))
    return prompts.next_position_P[groups_R][targets.row_C] + targets.offset_C


def _optimizer(policy: OmniPolicy, config: TrainerConfig) -> torch.optim.AdamW:
    """Return AdamW over the trained parameters: language model and towers apart, matrices with weight decay."""
    groups: list[dict[str, Any]] = []
    parts = {
        "language_model": (dict(policy.language_model.named_parameters()), config.lr),
        "towers": (dict(policy.towers()), config.tower_lr or config.lr),
    }
    for name, (parameters, lr) in parts.items():
        trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        for decay, chosen in (
            (config.weight_decay, [p for p in trained if p.dim() > 1]),
            (0.0, [p for p in trained if p.dim() <= 1]),
        ):
            if chosen:
                groups.append(
                    {"params": chosen, "lr": lr, "full_lr": lr, "weight_decay": decay, "name": name}
                )
    return torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=True)
