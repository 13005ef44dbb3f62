"""The policy gradient itself: no ratio and no clip. Rollouts of older weights need `correction.weight`.

    loss = -A log policy

Source: Williams 1992 (Machine Learning 8:229), REINFORCE; for language models: Back to Basics (arXiv:2402.14740),
section 2.2.

Shapes: N tokens.
"""

from __future__ import annotations

import torch

from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.inputs import LossInputs, PolicyLoss
from relax.algorithms.ratios import ratio


def reinforce(inputs: LossInputs, config: AlgorithmConfig) -> PolicyLoss:
    """Return the policy gradient's loss of each token; its ratio is only reported."""
    ratio_N = ratio(inputs.log_ratio_N.detach())
    nothing_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    return PolicyLoss(-inputs.advantages_N * inputs.logprobs_N, ratio_N, nothing_N)
