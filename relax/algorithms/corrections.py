"""Corrections for rollouts that another policy (or another arithmetic) sampled: weights, and tokens that do not count.

The ratio is trainer / rollout, without gradient, of a token, of its row, or of its row's average token. A rejected row
is rejected whole (`sequence`, `geometric`), a token alone (`token`).

    truncate   w = clip(r, low, high)                                  TIS
    mask       w = r if low <= r <= high else 0                        MIS; per token IcePop
    reject     a token counts if low <= r <= high                      sequence masks, geometric rejection
    OPSM       a row with A < 0 counts if mean(rollout - trainer) <= delta

With `proximal: trainer` and a weight per token the loss is AReaL's decoupled one: w * max(-A r', -A clip(r')),
r' = policy / proximal.

Source: truncation: Ionides 2008 (J. Comp. Graph. Stat. 17:295), per token IMPALA (arXiv:1802.01561), section 4.1;
decoupled: AReaL (arXiv:2505.24298), section 5.2; IcePop: Every Step Evolves (Ring-1T, arXiv:2510.18855),
where it is a band for the ratio of a token; OPSM: DeepSeek-V3.2 (arXiv:2512.02556), section 3.1, equations 8 and 9;
sequence and geometric levels: Liu, Li et al., When Speed Kills Stability (2025).

Shapes: N tokens (of whole rows).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from relax.algorithms.ratios import at_level, log_ratio, ratio, row_mean
from relax.algorithms.sections import CorrectionConfig


@dataclass(frozen=True)
class Correction:
    """What multiplies each token's policy loss, and which tokens count at all."""

    weight_N: Tensor
    counts_N: Tensor


def truncated_weight(ratio_N: Tensor, low: float, high: float) -> Tensor:
    """Return the ratio cut to [low, high]: bounded variance for a bounded bias."""
    return ratio_N.clamp(low, high)


def masked_weight(ratio_N: Tensor, low: float, high: float) -> Tensor:
    """Return the ratio inside [low, high], both included, and 0 outside."""
    return torch.where(is_within(ratio_N, low, high), ratio_N, torch.zeros_like(ratio_N))


def is_within(ratio_N: Tensor, low: float, high: float) -> Tensor:
    """Return whether low <= ratio <= high."""
    return (ratio_N >= low) & (ratio_N <= high)


def is_on_policy_enough(advantages_N: Tensor, mean_log_ratio_N: Tensor, delta: float) -> Tensor:
    """Return OPSM's mask: False where the advantage is negative and the row has moved more than `delta` nats away."""
    return ~((advantages_N < 0) & (-mean_log_ratio_N > delta))


def correct(
    trainer_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    advantages_N: Tensor,
    row_N: Tensor,
    config: CorrectionConfig,
    mask_N: Tensor | None = None,
) -> Correction:
    """Return weights and mask of all corrections but M2PO's, which looks at the whole batch (`m2po.py`)."""
    log_ratio_N = log_ratio(trainer_logprobs_N.detach(), rollout_logprobs_N, mask_N)
    weight_N = torch.ones_like(log_ratio_N)
    if config.weight != "none":
        ratio_N = ratio(at_level(log_ratio_N, row_N, mask_N, config.weight_level))
        made = truncated_weight if config.weight == "truncate" else masked_weight
        weight_N = made(ratio_N, config.weight_low, config.weight_high)
    counts_N = torch.ones_like(log_ratio_N, dtype=torch.bool)
    if config.reject != "none":
        ratio_N = ratio(at_level(log_ratio_N, row_N, mask_N, config.reject))
        counts_N = is_within(ratio_N, config.reject_low, config.reject_high)
    if config.opsm_delta is not None:
        mean_N = row_mean(log_ratio_N, row_N, mask_N)
        counts_N = counts_N & is_on_policy_enough(advantages_N, mean_N, config.opsm_delta)
    return Correction(weight_N, counts_N)
