"""Log-ratios of two policies, of a token or of its whole row. In log space until the last moment.

Shapes: N tokens. `row_N` says which row a token belongs to (any whole numbers from 0); all tokens of a row must be
there. `mask_N` is False for tokens that are not to be looked at; whatever they hold, NaN included, changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut here, in nats, before they are exponentiated."""


def log_ratio(new_logprobs_N: Tensor, old_logprobs_N: Tensor, mask_N: Tensor | None = None) -> Tensor:
    """Return new - old, 0 (with no gradient) where masked."""
    if mask_N is None:
        return new_logprobs_N - old_logprobs_N
    # Both sides are replaced before the difference: a NaN behind a single `where` would come back in the gradient.
    return new_logprobs_N.masked_fill(~mask_N, 0.0) - old_logprobs_N.masked_fill(~mask_N, 0.0)


def ratio(log_ratio_N: Tensor) -> Tensor:
    """Return exp(log-ratio), cut at 20 nats either way so that it cannot overflow."""
    return log_ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def row_sum(values_N: Tensor, row_N: Tensor) -> Tensor:
    """Return for each token the sum over its row."""
    num_rows = int(row_N.max()) + 1 if len(row_N) else 0
    return values_N.new_zeros(num_rows).index_add(0, row_N, values_N)[row_N]


def row_mean(values_N: Tensor, row_N: Tensor, mask_N: Tensor | None = None) -> Tensor:
    """Return for each token the mean over its row's unmasked tokens; 0 if there are none. Masked values must be 0."""
    counted_N = torch.ones_like(values_N) if mask_N is None else mask_N.to(values_N.dtype)
    return row_sum(values_N, row_N) / row_sum(counted_N, row_N).clamp(min=1.0)


def at_level(log_ratio_N: Tensor, row_N: Tensor, mask_N: Tensor | None, level: str) -> Tensor:
    """Return the log-ratio of the token, of its row (sum), or of its row's average token (geometric mean)."""
    if level == "token":
        return log_ratio_N
    if level == "sequence":
        return row_sum(log_ratio_N, row_N)
    if level == "geometric":
        return row_mean(log_ratio_N, row_N, mask_N)
    raise ValueError(f"at_level: level must be token, sequence or geometric, got {level!r}")
