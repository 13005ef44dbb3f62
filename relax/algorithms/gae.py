"""Generalized advantage estimation over the tokens of each row, and the returns that a critic learns.

    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lambda A_{t+1},   return_t = A_t + V_t

V_t is the value of what stands before token t; after the last token it is 0, since a completion is a whole episode. A
masked token (such as a tool's answer) was not chosen: it is passed over as if it were not there, what it was rewarded
goes to the token before, and it has advantage and return 0.

Source: GAE (arXiv:1506.02438), equation 16; passing over masked tokens is ours.

Shapes: N tokens (of whole rows, row after row).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """Advantages for the policy and returns for the critic."""

    advantages_N: Tensor
    returns_N: Tensor


def gae(
    rewards_N: Tensor,
    values_N: Tensor,
    row_N: Tensor,
    discount: float,
    gae_lambda: float,
    mask_N: Tensor | None = None,
) -> Estimate:
    """Return advantages and returns; both are 0 at masked tokens. No gradient."""
    rewards, values = rewards_N.double().tolist(), values_N.detach().double().tolist()
    rows = row_N.tolist()
    counted = [True] * len(rows) if mask_N is None else mask_N.tolist()
    advantages, returns = [0.0] * len(rows), [0.0] * len(rows)
    row, advantage, next_value, pending = -1, 0.0, 0.0, 0.0
    for token in range(len(rows) - 1, -1, -1):
        if rows[token] != row:
            row, advantage, next_value, pending = rows[token], 0.0, 0.0, 0.0
        if not counted[token]:
            pending += rewards[token]
            continue
        delta = rewards[token] + pending + discount * next_value - values[token]
        advantage = delta + discount * gae_lambda * advantage
        next_value, pending = values[token], 0.0
        advantages[token], returns[token] = advantage, advantage + values[token]
    made = (torch.tensor(each, dtype=values_N.dtype) for each in (advantages, returns))
    return Estimate(*made)
