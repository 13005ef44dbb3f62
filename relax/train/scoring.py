"""What a policy and its critic think of a whole batch before the step changes them. No gradient, no loss.

One more forward pass over all micro-batches, needed for a reference, and where something looks at the whole batch
before the first loss: advantages from values, and the bound on the batch's second moment.

Shapes: C completion tokens of the batch, N of a micro-batch, R tokens of a sequence on this rank, B sequences, H hidden
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relax.train.batch import MicroBatch
from relax.train.objective import Targets
from relax.train.pipeline import Pipeline
from relax.train.tasks import BatchPass


@dataclass(frozen=True)
class Scores:
    """Logprobs of completion tokens, and values where there is a critic."""

    logprobs_C: Tensor
    values_C: Tensor | None


class ScoringTask:
    """A micro-batch whose completion tokens are scored, in place, on the last stage."""

    def __init__(self, over: BatchPass, micro: MicroBatch, targets: Targets, scores: Scores) -> None:
        self.shape = over.shape(micro)
        self._over = over
        self._micro = micro
        self._targets = targets
        self._scores = scores

    def forward(self, received_RBH: Tensor | None) -> Tensor:
        """Return the hidden states for the next stage; on the last one record what they say."""
        run = self._over.begin(self._micro)
        output = run.forward(received_RBH)
        if self._over.policy.world.is_last_stage:
            seen = self._over.predictions(run, output, self._targets, entropy_gradient=False)
            self._scores.logprobs_C[run.targets] = seen.logprobs_N
            if self._scores.values_C is not None and seen.values_N is not None:
                self._scores.values_C[run.targets] = seen.values_N
        return output


@torch.no_grad()
def score(
    pipeline: Pipeline, over: BatchPass, micro_batches: Sequence[MicroBatch], targets: Targets
) -> Scores:
    """Return the scores of the whole batch on the CPU, the same on all ranks, all of which must call it.

    Args:
        pipeline: The stages' order.
        over: Whose scores; experts that the micro-batches name are replayed if they say so.
        micro_batches: Those of this rank's rows.
        targets: Of the whole batch, on this rank's device.
    """
    blank_C = torch.zeros_like(targets.rollout_logprobs_C)
    scores = Scores(blank_C, None if over.critic is None else blank_C.clone())
    pipeline.score([ScoringTask(over, micro, targets, scores) for micro in micro_batches])
    whole = over.policy.world.of_all_rows
    values_C = scores.values_C
    return Scores(whole(scores.logprobs_C).cpu(), None if values_C is None else whole(values_C).cpu())
