"""The critic's loss: squared distance from the return, with a bound on how far a value may move in one step.

    loss = max((V - R)^2, (clip(V, V_old - e, V_old + e) - R)^2) / 2

Source: Implementation Matters in Deep Policy Gradients (arXiv:2005.12729), section 3, value function clipping.

Shapes: N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values_N: Tensor,
    old_values_N: Tensor,
    returns_N: Tensor,
    value_clip: float | None,
    mask_N: Tensor | None = None,
) -> Tensor:
    """Return the loss of each token; 0 where masked."""
    if mask_N is not None:
        values_N, old_values_N, returns_N = (
            each.masked_fill(~mask_N, 0.0) for each in (values_N, old_values_N, returns_N)
        )
    plain_N = (values_N - returns_N).square()
    if value_clip is None:
        return plain_N / 2
    bounded_N = old_values_N + (values_N - old_values_N).clamp(-value_clip, value_clip)
    return torch.maximum(plain_N, (bounded_N - returns_N).square()) / 2
