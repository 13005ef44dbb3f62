"""Corrections for rollouts that another policy (or another arithmetic) sampled.

Shapes: N tokens.
"""

from __future__ import annotations

from torch import Tensor


def truncated_importance_weight(ratio_N: Tensor, cap: float) -> Tensor:
    """Return min(ratio, cap): bounded variance for a bounded bias.

    Source: Truncated importance sampling, Ionides 2008 (J. Comp. Graph. Stat. 17:295); per token for language
    models: IMPALA's rho-bar (arXiv:1802.01561), section 4.1.
    """
    return ratio_N.clamp(max=cap)
