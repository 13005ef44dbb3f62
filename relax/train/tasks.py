"""What a pipeline stage does with one micro-batch of a pass over the batch: training it. Scoring is beside it.

Shapes: C completion tokens of the batch, N predicted tokens of a micro-batch, R tokens of a sequence on this rank, B
sequences, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from relax.algorithms.config import AlgorithmConfig
from relax.train.batch import MicroBatch
from relax.train.critic import Critic
from relax.train.decoder_inputs import Completions, PromptTable
from relax.train.objective import StepTokens, Targets
from relax.train.policy import MicroRun, OmniPolicy
from relax.train.vocabulary import token_scores


@dataclass(frozen=True, kw_only=True)
class BatchPass:
    """What reads a batch, and the batch as it reads it."""

    policy: OmniPolicy
    prompts: PromptTable
    completions: Completions
    critic: Critic | None = None

    def begin(self, micro: MicroBatch) -> MicroRun:
        """Lay a micro-batch out on this rank."""
        return self.policy.begin(self.prompts, self.completions, micro)

    def shape(self, micro: MicroBatch) -> tuple[int, int, int]:
        """Return the shape of a micro-batch's hidden states on one rank of a stage, [R, B, H]."""
        layout = self.policy.world.layout
        length = micro.segment_BT.shape[1] // layout.cp // (layout.tp if layout.splits_norms else 1)
        return length, len(micro.segment_BT), self.policy.language_model.config.hidden_size

    def predictions(
        self, run: MicroRun, hidden_NH: Tensor, targets: Targets, *, entropy_gradient: bool
    ) -> Predictions:
        """Return what the last stage's hidden states say of `run.targets`, the same on all ranks with their rows."""
        own_N, counts_C = run.own_targets, targets.loss_mask_C
        scores = token_scores(
            self.policy.language_model.logits(hidden_NH),
            targets.token_ids_C[own_N],
            temperature=targets.temperature,
            counts_N=None if counts_C is None else counts_C[own_N],
            entropy_gradient=entropy_gradient,
            part=self.policy.vocabulary,
        )
        values = () if self.critic is None else (self.critic.values(hidden_NH),)
        joined = run.joined(torch.stack((*scores, *values), dim=1))
        return Predictions(joined[:, 0], joined[:, 1], joined[:, 2] if values else None)


@dataclass(frozen=True)
class Predictions:
    """Logprobs and entropies [N] in nats, and values where there is a critic."""

    logprobs_N: Tensor
    entropy_N: Tensor
    values_N: Tensor | None


class TrainingTask:
    """A micro-batch to be trained on.

    Attributes:
        shape: Of the hidden states between the stages, [R, B, H].
        routing_count: After `forward`, (token-layers whose own experts are others, token-layers compared).
    """

    def __init__(
        self, over: BatchPass, micro: MicroBatch, tokens: StepTokens, algorithm: AlgorithmConfig
    ) -> None:
        self.shape = over.shape(micro)
        self.routing_count = (0, 0)
        self._over = over
        self._micro = micro
        self._tokens = tokens
        self._algorithm = algorithm
        self._run: MicroRun | None = None

    def forward(self, received_RBH: Tensor | None) -> Tensor:
        """Return the hidden states for the next stage, or on the last one the loss."""
        self._run = run = self._over.begin(self._micro)
        output = run.forward(received_RBH)
        if self._over.policy.world.is_last_stage:
            output = self._loss(run, output)
        self.routing_count = run.session.count()
        return output

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run the backward pass in the block, and let go of the micro-batch."""
        if self._run is None:
            raise ValueError("TrainingTask.backward: forward must have run, got a task that has not begun")
        with self._run.backward():
            yield
        self._run = None

    def _loss(self, run: MicroRun, hidden_NH: Tensor) -> Tensor:
        algorithm = self._algorithm
        seen = self._over.predictions(
            run, hidden_NH, self._tokens.targets, entropy_gradient=algorithm.entropy_coef > 0
        )
        return self._tokens.loss_of(seen.logprobs_N, seen.entropy_N, run.targets, algorithm, seen.values_N)
