"""A critic away from the actor: the value head on the actor's snapshots, trained on the returns of what it trained on.

    version v   trunk of the actor's weights v, head after v steps       values of rows that come meanwhile
    step v + 1  forward without gradient -> value loss of the whole batch -> head's AdamW -> version v + 1

These are the sums that the trainer takes with a critic of its own whose loss stays out of its layers: the same tokens,
weights, learning rate and order. What differs is that the head takes its step also where the actor skips its own, for a
loss or gradient that is not finite.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.value_loss import value_loss
from relax.durable import flush
from relax.errors import TrainingError
from relax.train.batch import TrainBatch
from relax.train.config import TrainerConfig, lr_multiplier
from relax.train.critic import Critic
from relax.train.objective import per_token
from relax.train.row_scorer import PreparedBatch, RowScorer, RowScores


class ValueLearner:
    """A head on a scorer's policy.

    Attributes:
        num_steps: Steps that the head has taken or passed over; also the policy version that its values are of.
    """

    def __init__(self, scorer: RowScorer, config: TrainerConfig, algorithm: AlgorithmConfig) -> None:
        self._scorer = scorer
        self._config = config
        self._algorithm = algorithm
        hidden_size = scorer.policy.language_model.config.hidden_size
        self.critic = Critic(hidden_size, algorithm.critic).to(scorer.world.device)
        self.num_steps = 0

    def score(self, batch: TrainBatch) -> RowScores:
        """Return values of the batch's completion tokens."""
        return self._scorer.score(batch, self.critic)

    def learn(self, batch: TrainBatch, returns: list) -> dict[str, float]:
        """Take the step of a training batch, whole; `batch.given.values` are those before it. Return its metrics.

        Raises:
            TrainingError: the batch has no values, or cannot be scored.
        """
        if batch.given.values is None:
            raise TrainingError("critic: batch must have the values before the step, got none")
        ready = self._scorer.prepare(batch)
        old_C, returns_C = per_token(batch.given.values), per_token(returns)
        values_C = torch.zeros_like(old_C)
        self.critic.forget_gradients()
        loss = sum(
            self._backward(ready, place, old_C, returns_C, values_C)
            for place in range(len(ready.micro_batches))
        )
        multiplier = lr_multiplier(self._config, self.num_steps + 1)
        update = self.critic.update(multiplier, skip=False)
        self.num_steps += 1
        left, spread = (returns_C - values_C).var(unbiased=False), returns_C.var(unbiased=False)
        return {
            "value_loss": loss,
            "value_mean": float(values_C.mean()),
            "return_mean": float(returns_C.mean()),
            "value_explained_variance": float(1 - left / spread.clamp(min=1e-8)),
            **update,
        }

    def _backward(
        self,
        ready: PreparedBatch,
        place: int,
        old_C: torch.Tensor,
        returns_C: torch.Tensor,
        values_C: torch.Tensor,
    ) -> float:
        """Add the gradients of one micro-batch to the head's; note its values, return its part of the loss."""
        device, settings, targets = self._scorer.world.device, self._algorithm.critic, ready.targets
        with torch.no_grad():
            run = ready.over.begin(ready.micro_batches[place])
            hidden_NH = run.forward(None)
        target_N = run.targets.cpu()
        mask_C = targets.loss_mask_C
        mask_N = None if mask_C is None else mask_C[target_N].to(device)
        values_N = self.critic.values(hidden_NH)
        loss_N = value_loss(
            values_N, old_C[target_N].to(device), returns_C[target_N].to(device), settings.value_clip, mask_N
        )
        if mask_N is not None:
            loss_N = loss_N.masked_fill(~mask_N, 0.0)
        weighted = loss_N * targets.weight_C[target_N].to(device)
        (settings.value_coef * weighted).sum().backward()
        values_C[target_N] = values_N.detach().cpu()
        return float(weighted.detach().sum())

    def save(self, path: Path) -> None:
        """Write the head and its optimizer to a file that appears whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        save_file(self.critic.tensors(), partial)
        flush(partial)
        partial.rename(path)

    def load(self, path: Path, num_steps: int) -> None:
        """Go on from what `save`, or the trainer's checkpoint, wrote after `num_steps`.

        Raises:
            TrainingError: it is of another head.
        """
        self.critic.load(load_file(path))
        self.num_steps = num_steps
