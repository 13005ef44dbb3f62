"""Scores rows under the weights of a snapshot, forward only: what the trainer would say of them, without a trainer.

The same model code, micro-batches and arithmetic as the trainer's, on one process, so the same numbers. It has no
optimizer and no loss, and knows no queue.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from relax.algorithms.config import AlgorithmConfig
from relax.models.snapshot import read_snapshot
from relax.train.batch import MicroBatch, TrainBatch, check_batch
from relax.train.config import TrainerConfig
from relax.train.critic import Critic
from relax.train.layout import LayoutConfig
from relax.train.objective import Targets
from relax.train.passes import cut, moved, pass_over, routing_of
from relax.train.pipeline import Pipeline
from relax.train.policy import OmniPolicy
from relax.train.runtime import start_parallel
from relax.train.scoring import score
from relax.train.tasks import BatchPass

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class RowScores:
    """Of the completion tokens of each row, float32 [num_completion_tokens]."""

    logprobs: list[np.ndarray]
    """In nats."""
    values: list[np.ndarray] | None = None
    """None without a critic."""


@dataclass(frozen=True, kw_only=True)
class PreparedBatch:
    """A batch ready for forward passes: what reads it, its pieces, and its tokens on the CPU."""

    over: BatchPass
    micro_batches: list[MicroBatch]
    targets: Targets


class RowScorer:
    """A frozen policy on one process.

    Args:
        model_dir: Hugging Face directory; its weights are policy version 0.
        config: The trainer's; its layout is not looked at.
        algorithm: Of the run.
        seed: Of the run.
        replays_routing: Use the rollout's experts, as the trainer does; a reference routes by itself.

    Attributes:
        policy_version: Of the weights that score.
    """

    def __init__(
        self,
        model_dir: Path | str,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        *,
        seed: int,
        replays_routing: bool,
    ) -> None:
        replay = config.routing_replay and replays_routing
        self._config = replace(config, layout=LayoutConfig(), routing_replay=replay, routing_metrics=False)
        self._algorithm = algorithm
        dtype = DTYPES[config.dtype]
        torch.set_num_threads(config.num_threads)
        self.world = start_parallel(seed, self._config.layout, deadline_s=config.rank_deadline_s)
        self.policy = OmniPolicy(Path(model_dir), self.world, freeze_towers=True, dtype=dtype)
        self.policy.requires_grad_(False).eval()
        self._pipeline = Pipeline(self.world, dtype)
        self.policy_version = 0

    def adopt(self, snapshot: Path) -> int:
        """Take the weights of a snapshot; return its policy version.

        Raises:
            FileNotFoundError: it is gone; nothing has changed.
            SnapshotError: it is damaged; nothing has changed.
            TrainingError: it is of another model.
        """
        version, tensors = read_snapshot(snapshot)
        self.policy.adopt(tensors)
        self.policy_version = version
        return version

    @torch.no_grad()
    def prepare(self, batch: TrainBatch, critic: Critic | None = None) -> PreparedBatch:
        """Run the towers over a batch of whole groups and lay it out.

        Raises:
            TrainingError: the batch cannot be scored.
        """
        check_batch(batch, self.policy.vocab_size, routing_of(batch, self.policy, self._config))
        targets = Targets.from_batch(batch, self._algorithm)
        prompts = self.policy.embed_prompts(batch.own_prompts)
        return PreparedBatch(
            over=pass_over(batch, self.policy, prompts, targets, critic),
            micro_batches=cut(batch, self.policy, self._config),
            targets=targets,
        )

    def score(self, batch: TrainBatch, critic: Critic | None = None) -> RowScores:
        """Return the logprobs of a batch's completions, and with a critic their values.

        Raises:
            TrainingError: the batch cannot be scored.
        """
        ready = self.prepare(batch, critic)
        targets = ready.targets
        scores = score(self._pipeline, ready.over, ready.micro_batches, moved(targets, self.world.device))
        values_C = scores.values_C
        return RowScores(
            logprobs=targets.by_row(scores.logprobs_C),
            values=None if values_C is None else targets.by_row(values_C),
        )
