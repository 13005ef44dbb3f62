"""What the policy and its critic think of a whole batch before the step changes them. No gradient, no loss.

One more forward pass over all micro-batches, needed where something looks at the whole batch before the first loss:
advantages from values, and the bound on the batch's second moment.

Shapes: C completion tokens of the batch, N of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relax.train.batch import MicroBatch
from relax.train.critic import Critic
from relax.train.objective import Targets
from relax.train.policy import OmniPolicy, PromptTable


@dataclass(frozen=True)
class Scores:
    """Logprobs of every completion token, and values where there is a critic."""

    logprobs_C: Tensor
    values_C: Tensor | None


@torch.no_grad()
def score(
    policy: OmniPolicy,
    critic: Critic | None,
    prompts: PromptTable,
    targets: Targets,
    position_C: Tensor,
    micro_batches: Sequence[MicroBatch],
) -> Scores:
    """Return the scores of a batch under the present weights, routing replayed as in training."""
    logprobs_C = torch.zeros_like(targets.rollout_logprobs_C)
    values_C = torch.zeros_like(logprobs_C)
    for micro in micro_batches:
        target_N = torch.from_numpy(micro.target_N)
        with policy.replaying(micro):
            hidden_NH = policy.predictors(prompts, targets.token_ids_C, position_C, micro)
        log_probs_NV = (policy.language_model.logits(hidden_NH).float() / targets.temperature).log_softmax(-1)
        logprobs_C[target_N] = log_probs_NV.gather(1, targets.token_ids_C[target_N][:, None])[:, 0]
        if critic is not None:
            values_C[target_N] = critic.values(hidden_NH)
    return Scores(logprobs_C, values_C if critic is not None else None)
