"""The trainer: one optimizer step for each batch of complete groups, and the weights out of it.

    check -> towers once a prompt -> scores of the whole batch if the algorithm needs them -> advantages
          -> micro-batches (loss, backward) -> towers' backward -> gradients summed over the ranks -> clip -> AdamW
          -> metrics

It talks to no queue. On several ranks each calls the same methods in the same order; batches differ in the rows that
a rank trains. A batch that cannot be trained on is refused before anything changes; a step whose loss or gradient is
not finite changes no weight, is counted, and says so in its metrics.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from relax.algorithms.config import AlgorithmConfig
from relax.models.pretrained import export_pretrained
from relax.train.batch import MicroBatch, TrainBatch, check_batch
from relax.train.checkpoint import CheckpointWriter, read_checkpoint, read_tensors_beside
from relax.train.config import TrainerConfig, lr_multiplier
from relax.train.critic import Critic
from relax.train.decoder_inputs import PromptTable
from relax.train.export import WeightExport, write_weights
from relax.train.gradients import is_finite
from relax.train.objective import StepTokens, Targets, per_token
from relax.train.optimizer import Weights
from relax.train.passes import cut, moved, pass_over, routing_of
from relax.train.pipeline import Pipeline
from relax.train.policy import OmniPolicy
from relax.train.runtime import start_parallel
from relax.train.scoring import score
from relax.train.tasks import TrainingTask

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BUCKET_BYTES = 512 << 20
"""Weights that are gathered at a time unless the caller says otherwise."""
CRITIC_FILE = "critic.safetensors"
"""File of a checkpoint with the value head and its optimizer."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step saw, under the weights before it: of the whole batch, on every rank."""

    metrics: dict[str, float]
    advantages: list[np.ndarray]
    """float32 [num_completion_tokens] for each row."""
    trainer_logprobs: list[np.ndarray]
    """float32 [num_completion_tokens] for each row, nats."""
    importance_ratio: np.ndarray
    """float32 [num_rows]: mean over the row's tokens of exp(trainer - rollout logprob)."""
    returns: list[np.ndarray] | None = None
    """float32 [num_completion_tokens] for each row: what its values should have been; None without a critic, or where
    another service gives the advantages."""


class Trainer:
    """A policy and its optimizer, as far as they are this rank's.

    Attributes:
        world: This rank's place among the trainer's processes.
        policy: The model that is trained.
        critic: Its value head, on every rank; None unless the advantages need one and nobody else has it.
        weights: Its trained parameters, their masters and AdamW.
        num_steps: Optimizer steps that changed the weights.
        num_skipped_steps: Steps that did not, because the loss or the gradient was not finite.
    """

    def __init__(
        self,
        model_dir: Path | str,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        *,
        seed: int,
        services: Collection[str] = (),
    ) -> None:
        """Load the model; all ranks must do so. `services`: roles whose scores come with the batches (`given`)."""
        self._model_dir = Path(model_dir)
        self._config = config
        self._algorithm = algorithm
        self._dtype = DTYPES[config.dtype]
        torch.set_num_threads(config.num_threads)
        self.world = start_parallel(seed, config.layout, deadline_s=config.rank_deadline_s)
        self.policy = OmniPolicy(
            self._model_dir,
            self.world,
            freeze_towers=config.freeze_towers,
            recompute=config.recompute,
            dtype=self._dtype,
        )
        self._reference = (
            self._load_reference() if algorithm.kl_coef and "reference" not in services else None
        )
        self._pipeline = Pipeline(self.world, self._dtype)
        self.weights = Weights(self.policy, config)
        self.critic: Critic | None = None
        if algorithm.has_critic and "critic" not in services:
            hidden_size = self.policy.language_model.config.hidden_size
            self.critic = Critic(hidden_size, algorithm.critic).to(self.world.device)
        self.num_steps = 0
        self.num_skipped_steps = 0

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW over the masters whose state is on this rank."""
        return self.weights.optimizer

    def train_step(self, batch: TrainBatch) -> StepResult:
        """Train one step on a batch. Blocks; changes the weights unless the metrics say `step_skipped`.

        Raises:
            TrainingError: the batch cannot be trained on; nothing has changed.
            relax.models.errors.PromptError: a prompt does not fit the model; nothing has changed.
        """
        started = time.perf_counter()
        check_batch(batch, self.policy.vocab_size, routing_of(batch, self.policy, self._config))
        targets = Targets.from_batch(batch, self._algorithm)
        micro_batches = cut(batch, self.policy, self._config)
        planned = time.perf_counter()
        ref_logprobs_C = self._reference_logprobs(batch, targets, micro_batches)
        referred = time.perf_counter()
        prompts = self.policy.embed_prompts(batch.own_prompts)
        embedded = time.perf_counter()
        tokens = self._step_tokens(batch, prompts, targets, micro_batches, ref_logprobs_C)
        scored = time.perf_counter()
        tokens = moved(tokens, self.world.device)
        routing_metrics = self._accumulate(batch, prompts, tokens, micro_batches)
        self._share(tokens)
        tokens = moved(tokens, torch.device("cpu"))
        accumulated = time.perf_counter()
        update_metrics = self._update(tokens.loss)
        done = time.perf_counter()
        metrics = tokens.metrics() | routing_metrics | update_metrics | self._sizes(batch, micro_batches)
        metrics |= {
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
            advantages=tokens.targets.by_row(tokens.targets.advantages_C),
            trainer_logprobs=tokens.targets.by_row(tokens.trainer_logprobs_C),
            importance_ratio=tokens.targets.row_means(tokens.ratio_C).numpy(),
            returns=None
            if tokens.targets.returns_C is None
            else tokens.targets.by_row(tokens.targets.returns_C),
        )

    def weight_export(self, bucket_bytes: int = BUCKET_BYTES) -> WeightExport:
        """Return a way for the weights out. All ranks must call it."""
        return WeightExport(self.policy, bucket_bytes)

    def publish(self, snapshot_dir: Path, policy_version: int, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Write the weights as a snapshot that appears whole or not at all, and wait. All ranks must call it."""
        write_weights(self.weight_export(bucket_bytes), self.world, snapshot_dir, policy_version)

    def save_pretrained(self, directory: Path, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Write a Hugging Face directory: the weights, and every other file of the model directory as it was.

        Files of weights have `bucket_bytes` at most, unless one tensor has more. All ranks must call it.
        """
        snapshot = directory.parent / f".{directory.name}.{os.getpid()}.weights.partial"
        try:
            self.publish(snapshot, self.num_steps, bucket_bytes=bucket_bytes)
            if self.world.rank == 0:
                export_pretrained(directory, self._model_dir, snapshot)
        finally:
            shutil.rmtree(snapshot, ignore_errors=True)
        self.world.wait_for_all()

    def begin_checkpoint(
        self,
        directory: Path,
        facts: Mapping[str, Any] | None = None,
        *,
        in_background: bool = True,
        fill: Callable[[Path], None] | None = None,
        critic_file: Path | None = None,
    ) -> CheckpointWriter:
        """Begin a Megatron checkpoint from which `load_checkpoint` goes on exactly; `finish` it later.

        All ranks must call it. `facts` of rank 0 are kept in its description; `fill` as in `CheckpointWriter`.
        `critic_file` is the head of a critic that is elsewhere, on rank 0.
        """
        beside = {} if self.critic is None else {CRITIC_FILE: self.critic.tensors()}
        if critic_file is not None:
            beside = {CRITIC_FILE: load_file(critic_file)}
        counts = {"num_steps": self.num_steps, "num_skipped_steps": self.num_skipped_steps}
        return CheckpointWriter(
            directory,
            self.policy,
            self.weights,
            {"counts": counts, **(facts or {})},
            beside=beside,
            in_background=in_background,
            fill=fill,
        )

    def save_checkpoint(self, directory: Path, critic_file: Path | None = None) -> None:
        """Write a Megatron checkpoint and wait until it is on the disk; replaces an older one there.

        All ranks must call it; see `begin_checkpoint`.
        """
        writer = self.begin_checkpoint(directory, in_background=False, critic_file=critic_file)
        writer.finish(self._config.rank_deadline_s)

    def load_checkpoint(self, directory: Path) -> None:
        """Go on from a checkpoint: weights, optimizer, critic if there is one, step counts and random state.

        All ranks must call it.

        Raises:
            TrainingError: there is no checkpoint, or one of another model, or one without the critic.
        """
        if self.critic is not None:
            self.critic.load(read_tensors_beside(directory, CRITIC_FILE))
        state = read_checkpoint(directory, self.policy, self.weights)
        self.num_steps = state["num_steps"]
        self.num_skipped_steps = state["num_skipped_steps"]

    def _load_reference(self) -> OmniPolicy:
        """Return a frozen copy of the model that training starts from."""
        reference = OmniPolicy(self._model_dir, self.world, freeze_towers=True, dtype=self._dtype)
        return reference.requires_grad_(False).eval()

    @torch.no_grad()
    def _reference_logprobs(
        self, batch: TrainBatch, targets: Targets, micro_batches: list[MicroBatch]
    ) -> Tensor | None:
        """Return the reference's logprobs [C], under its own routing; None when there is no reference."""
        if batch.given.ref_logprobs is not None:
            return per_token(batch.given.ref_logprobs)
        if self._reference is None:
            return None
        over = pass_over(batch, self._reference, self._reference.embed_prompts(batch.own_prompts), targets)
        unrouted = [replace(micro, experts_BTLK=None) for micro in micro_batches]
        return score(self._pipeline, over, unrouted, moved(targets, self.world.device)).logprobs_C

    def _step_tokens(
        self,
        batch: TrainBatch,
        prompts: PromptTable,
        targets: Targets,
        micro_batches: list[MicroBatch],
        ref_logprobs_C: Tensor | None,
    ) -> StepTokens:
        """Return the step's tokens with the advantages, and with what needs the whole batch before the first loss.

        Every rank has the light columns and the scores of all rows, so that all compute the same.
        """
        algorithm, given = self._algorithm, batch.given
        logprobs_C = None if given.proximal_logprobs is None else per_token(given.proximal_logprobs)
        values_C = None if given.values is None else per_token(given.values)
        if self.critic is not None or (algorithm.correction.m2_budget is not None and logprobs_C is None):
            over = pass_over(batch, self.policy, prompts, targets, self.critic)
            scores = score(self._pipeline, over, micro_batches, moved(targets, self.world.device))
            logprobs_C = scores.logprobs_C if logprobs_C is None else logprobs_C
            values_C = scores.values_C if values_C is None else values_C
        if algorithm.has_late_credit and given.raw_advantages is None:
            targets = targets.credited(algorithm, ref_logprobs_C=ref_logprobs_C, values_C=values_C)
        tokens = StepTokens(
            targets=targets,
            ref_logprobs_C=ref_logprobs_C,
            proximal_logprobs_C=logprobs_C,
            old_values_C=values_C,
            learns_values=self.critic is not None,
        )
        if algorithm.correction.m2_budget is not None:
            tokens.bound_second_moment(algorithm.correction.m2_budget)
        return tokens

    def _accumulate(
        self, batch: TrainBatch, prompts: PromptTable, tokens: StepTokens, micro_batches: list[MicroBatch]
    ) -> dict[str, float]:
        """Run all micro-batches forward and backward; gradients add up in the parameters."""
        self.weights.zero_gradients()
        if self.critic is not None:
            self.critic.forget_gradients()
        leaves = prompts.leaves()
        over = pass_over(batch, self.policy, leaves, tokens.targets, self.critic)
        tasks = [TrainingTask(over, micro, tokens, self._algorithm) for micro in micro_batches]
        self._pipeline.train(tasks)
        prompts.backward(leaves)
        counts = [sum(each) for each in zip(*(task.routing_count for task in tasks), strict=True)]
        summed = self.world.sum(torch.tensor(counts, dtype=torch.float64, device=self.world.device))
        num_differing, num_counted = summed.tolist()
        return {"routing_mismatch": num_differing / num_counted} if num_counted else {}

    def _share(self, tokens: StepTokens) -> None:
        """Give all ranks what was recorded of every token of the batch, and the loss of all of them."""
        if self.world.size == 1:
            return
        whole = self.world.of_all_rows
        for item in fields(tokens):
            value = getattr(tokens, item.name)
            if not item.init and isinstance(value, Tensor):
                setattr(tokens, item.name, whole(value))
        losses = whole(torch.tensor([tokens.loss, tokens.value_loss], dtype=torch.float64))
        tokens.loss, tokens.value_loss = losses.tolist()

    def _update(self, loss: float) -> dict[str, float]:
        """Clip and apply the gradients, or leave the weights alone when they are not finite."""
        config = self._config
        self.weights.gradients.add_up()
        norm = self.weights.gradients.norm()
        skipped = not is_finite(loss, norm)
        multiplier = lr_multiplier(config, self.num_steps + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = group["full_lr"] * multiplier
        if skipped:
            self.num_skipped_steps += 1
        else:
            self.weights.step(norm, config.max_grad_norm)
            self.num_steps += 1
        critic: dict[str, float] = {}
        if self.critic is not None:
            self.critic.add_up(self.world)
            critic = self.critic.update(multiplier, skip=skipped)
        return {
            "grad_norm": float(norm),
            "lr": config.lr * multiplier,
            "tower_lr": 0.0 if config.freeze_towers else (config.tower_lr or config.lr) * multiplier,
            "step_skipped": float(skipped),
            "num_skipped_steps": float(self.num_skipped_steps),
            "num_steps": float(self.num_steps),
            **critic,
        }

    def _sizes(self, batch: TrainBatch, micro_batches: list[MicroBatch]) -> dict[str, float]:
        """Return the sizes of the step; tokens of all data parallel ranks, micro-batches of this one."""
        held = torch.tensor(
            [
                float(sum((micro.segment_BT >= 0).sum() for micro in micro_batches)),
                float(sum(micro.segment_BT.size for micro in micro_batches)),
            ],
            dtype=torch.float64,
        )
        num_tokens, num_padded = self.world.of_all_rows(held).tolist()
        return {
            "num_rows": float(batch.num_rows),
            "num_micro_batches": float(len(micro_batches)),
            "num_sequence_tokens": num_tokens,
            "num_padded_tokens": num_padded,
        }
