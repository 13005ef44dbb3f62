"""Soft adaptive policy optimization: a smooth gate in place of the clip.

    loss = -A (4 / tau) sigmoid(tau (r - 1)),  tau = gate_positive for A > 0, else gate_negative

At r = 1 its gradient is that of -A r; it falls off on both sides, the faster the larger tau.

Source: Soft Adaptive Policy Optimization (arXiv:2511.20347), section 3, with 1.0 and 1.05 as its temperatures.

Shapes: N tokens.
"""

from __future__ import annotations

import torch

from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.inputs import LossInputs, PolicyLoss
from relax.algorithms.ratios import ratio


def sapo(inputs: LossInputs, config: AlgorithmConfig) -> PolicyLoss:
    """Return the gated surrogate of each token; nothing counts as clipped."""
    ratio_N = ratio(inputs.log_ratio_N)
    tau_N = torch.full_like(ratio_N, config.gate_negative)
    tau_N = tau_N.masked_fill(inputs.advantages_N > 0, config.gate_positive)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1)) * 4 / tau_N
    return PolicyLoss(
        -inputs.advantages_N * gate_N, ratio_N.detach(), torch.zeros_like(ratio_N, dtype=torch.bool)
    )
