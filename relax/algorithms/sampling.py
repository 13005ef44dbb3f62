"""Which groups are worth training on, and what length costs. Numpy only, no torch.

    dynamic sampling    a group counts if its rewards are not all equal
    soft overlong       0 up to limit - cache tokens, then falling in a straight line to -penalty at the limit

Source: DAPO (arXiv:2503.14476), section 3.2, equation 11, and section 3.4, equation 13 (there the limit is 20480 tokens
and the cache 4096 of them, a part of 0.2).

Shapes: R rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def informative_rows(rewards_R: np.ndarray, groups_R: Sequence[object]) -> np.ndarray:
    """Return for each row whether its group's rewards differ; NaN differs from everything."""
    _, first_R, group_R = np.unique(np.asarray(groups_R), return_index=True, return_inverse=True)
    differs_R = rewards_R != rewards_R[first_R][group_R]  # NaN differs from itself
    return np.bincount(group_R, weights=differs_R, minlength=len(first_R))[group_R] > 0


def overlong_penalties(
    num_tokens_R: np.ndarray, limit_tokens: int, part: float, penalty: float = 1.0
) -> np.ndarray:
    """Return what is added to each row's reward, 0 to -penalty; `part` of the limit is the cache."""
    cache = part * limit_tokens
    if not cache:
        return np.zeros(len(num_tokens_R), np.float32)
    beyond_R = np.asarray(num_tokens_R, np.float64) - (limit_tokens - cache)
    return (-penalty * np.clip(beyond_R / cache, 0.0, 1.0)).astype(np.float32)
