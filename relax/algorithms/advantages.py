"""Advantages from the rewards of a group's rows: GRPO, Dr. GRPO, RLOO. No value model, no tokens.

Shapes: N rows, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

STD_FLOOR = 1e-6


def grpo(rewards_N: Tensor, group_index_N: Tensor) -> Tensor:
    """Return (reward - group mean) / group standard deviation (n - 1 in the denominator).

    A group whose rewards are all equal, or of one row, gets zeros.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision.
    """
    centred_N = dr_grpo(rewards_N, group_index_N)
    count_N = _group_sum(torch.ones_like(centred_N), group_index_N)
    variance_N = _group_sum(centred_N.square(), group_index_N) / (count_N - 1).clamp(min=1)
    std_N = variance_N.sqrt()
    return torch.where(std_N > STD_FLOOR, centred_N / std_N.clamp(min=STD_FLOOR), torch.zeros_like(centred_N))


def dr_grpo(rewards_N: Tensor, group_index_N: Tensor) -> Tensor:
    """Return reward - group mean.

    Source: Understanding R1-Zero-Like Training (arXiv:2503.20783), section 3.2.
    """
    count_N = _group_sum(torch.ones_like(rewards_N), group_index_N)
    return rewards_N - _group_sum(rewards_N, group_index_N) / count_N


def rloo(rewards_N: Tensor, group_index_N: Tensor) -> Tensor:
    """Return reward - mean reward of the group's other rows; zeros for a group of one row.

    Source: Back to Basics (arXiv:2402.14740), section 2.3, REINFORCE leave-one-out.
    """
    count_N = _group_sum(torch.ones_like(rewards_N), group_index_N)
    return dr_grpo(rewards_N, group_index_N) * count_N / (count_N - 1).clamp(min=1)


BY_NAME = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def _group_sum(values_N: Tensor, group_index_N: Tensor) -> Tensor:
    num_groups = int(group_index_N.max()) + 1
    total_G = values_N.new_zeros(num_groups).index_add(0, group_index_N, values_N)
    return total_G[group_index_N]
