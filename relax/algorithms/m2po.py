"""The second-moment bound: tokens furthest from the rollout's policy are left out until the rest is close enough.

    M2 = mean over the tokens that count of (log(trainer / rollout))^2 <= budget

The square grows both ways, so that tokens that became far less likely are caught too, which a mean of log-ratios would
let cancel. The mean is that of the whole batch, over all micro-batches and ranks (`whole_M`).

Source: Prosperity before Collapse (arXiv:2510.01161), M2PO, which uses budget 0.04. The largest squares go first here,
whatever the sign of the advantage.

Shapes: N tokens of the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def second_moment_mask(
    log_ratio_N: Tensor, budget: float, mask_N: Tensor | None = None, whole_M: Tensor | None = None
) -> Tensor:
    """Return which tokens count: as many as can, those with the smallest squared log-ratio. Equal ones go together.

    `whole_M` are the log-ratios of all unmasked tokens of the batch where not all of them are here.
    """
    counted_N = torch.ones_like(log_ratio_N, dtype=torch.bool) if mask_N is None else mask_N
    square_N = log_ratio_N.detach().double().masked_fill(~counted_N, 0.0).square()
    square_M = square_N[counted_N] if whole_M is None else whole_M.double().square()
    if not len(square_M):
        return counted_N
    ordered_M = square_M.sort().values
    number_M = torch.arange(1, len(ordered_M) + 1, dtype=torch.float64)
    # The running mean of sorted values never falls, so that those that fit are the first ones.
    num_kept = int((ordered_M.cumsum(0) / number_M <= budget).sum())
    if num_kept == len(ordered_M):
        return counted_N
    # Equal squares must not be split by the order of a sort: what equals the first one left out is left out.
    return counted_N & (square_N < ordered_M[num_kept])
