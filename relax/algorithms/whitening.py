"""Shift and scale to mean 0 and standard deviation 1 over a whole batch.

    x' = (x - mean) / std,  variance with n in the denominator

Sums are in float64. With several data-parallel ranks `all_sum` adds the three sums of all of them.

Source: REINFORCE++ (arXiv:2501.03262), global advantage normalization; Implementation Matters (arXiv:2005.12729).

Shapes: N values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

STD_FLOOR = 1e-6

AllSum = Callable[[Tensor], Tensor]
"""Sum of a small tensor over all ranks that hold a part of the batch."""


def whiten(values_N: Tensor, mask_N: Tensor | None = None, all_sum: AllSum | None = None) -> Tensor:
    """Return the whitened values; masked ones are 0 and do not count; values without any spread are all 0."""
    counted_N = torch.ones_like(values_N, dtype=torch.bool) if mask_N is None else mask_N
    exact_N = values_N.double().masked_fill(~counted_N, 0.0)
    sums_3 = torch.stack((counted_N.double().sum(), exact_N.sum(), exact_N.square().sum()))
    count, total, squares = all_sum(sums_3) if all_sum else sums_3
    mean = total / count.clamp(min=1)
    std = (squares / count.clamp(min=1) - mean.square()).clamp(min=0).sqrt()
    scaled_N = (exact_N - mean) / std if float(std) > STD_FLOOR else torch.zeros_like(exact_N)
    return scaled_N.masked_fill(~counted_N, 0.0).to(values_N.dtype)
