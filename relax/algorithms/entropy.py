"""Entropy of the next-token distribution, the bonus that keeps a policy from settling too early.

    H = -sum_v p_v log p_v

Source: Williams and Peng 1991 (Connection Science 3:241); with policy gradients: A3C (arXiv:1602.01783), section 4.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

LEAST_LOGPROB = -1e4
"""Stands in for log 0, whose product with 0 would be NaN."""


def entropy(log_probs_NV: Tensor) -> Tensor:
    """Return the entropy of each distribution in nats, [N]; tokens of probability 0 add nothing."""
    return -(log_probs_NV.exp() * log_probs_NV.clamp(min=LEAST_LOGPROB)).sum(-1)
