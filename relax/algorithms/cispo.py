"""Clipped importance-sampling weights: the ratio is clipped as a weight, so that no token loses its gradient.

    loss = -sg(clip(r, 1 - low, 1 + high)) A log policy

Source: MiniMax-M1 (arXiv:2506.13585), section 3.1, equations 4 and 5; there `clip_low` is 1, that is no lower bound.

Shapes: N tokens.
"""

from __future__ import annotations

from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.inputs import LossInputs, PolicyLoss
from relax.algorithms.ratios import ratio


def cispo(inputs: LossInputs, config: AlgorithmConfig) -> PolicyLoss:
    """Return the weighted policy gradient's loss of each token."""
    ratio_N = ratio(inputs.log_ratio_N.detach())
    weight_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    return PolicyLoss(-weight_N * inputs.advantages_N * inputs.logprobs_N, ratio_N, weight_N != ratio_N)
