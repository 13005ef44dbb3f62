"""The importance-weighted surrogate without any clip; what keeps it in bounds is a correction, such as M2PO's.

    loss = -A r

Source: Conservative policy iteration's surrogate as in PPO (arXiv:1707.06347), equation 6.

Shapes: N tokens.
"""

from __future__ import annotations

import torch

from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.inputs import LossInputs, PolicyLoss
from relax.algorithms.ratios import ratio


def surrogate(inputs: LossInputs, config: AlgorithmConfig) -> PolicyLoss:
    """Return the surrogate of each token."""
    ratio_N = ratio(inputs.log_ratio_N)
    return PolicyLoss(
        -inputs.advantages_N * ratio_N, ratio_N.detach(), torch.zeros_like(ratio_N, dtype=torch.bool)
    )
