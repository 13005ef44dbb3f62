"""PPO's clipped surrogate, with separate bounds and an optional bound for bad tokens.

    loss = max(-A r, -A clip(r, 1 - low, 1 + high)),  for A < 0 at most -A dual_clip

Source: PPO (arXiv:1707.06347), equation 7; separate bounds: DAPO (arXiv:2503.14476), section 3.1; `dual_clip`:
Mastering Complex Control in MOBA Games (arXiv:1912.09729), equation 5.

Shapes: N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.inputs import LossInputs, PolicyLoss
from relax.algorithms.ratios import ratio


def ppo_clip(inputs: LossInputs, config: AlgorithmConfig) -> PolicyLoss:
    """Return the clipped surrogate of each token."""
    return clipped_surrogate(ratio(inputs.log_ratio_N), inputs.advantages_N, config)


def clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, config: AlgorithmConfig) -> PolicyLoss:
    """Return the clipped surrogate for given ratios."""
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
