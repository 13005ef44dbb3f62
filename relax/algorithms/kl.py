"""Estimators of KL(p || q) from samples of p, per token, given both log-probabilities.

As values k1 and k3 are unbiased, k2 is not; k1 may be negative, k2 and k3 never are; k3 has the lowest variance near
p = q. As a loss k1 has a gradient that is zero on average, k2 has the right one on policy, k3 that of KL(q || p);
`unbiased` weighs k3 by the ratio of p to the policy that sampled, and has the right gradient.

Source: J. Schulman, Approximating KL Divergence (2020); gradients: Tang and Munos (arXiv:2506.09477); `unbiased`:
DeepSeek-V3.2 (arXiv:2512.02556), section 3.1, equation 7; in the loss: GRPO (arXiv:2402.03300), equation 4; in the
reward: Ziegler et al. (arXiv:1909.08593), equation 2. The cap is ours.

Shapes: N tokens sampled from p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax.algorithms.ratios import LOG_RATIO_LIMIT, log_ratio, ratio


def k1(p_logprobs_N: Tensor, q_logprobs_N: Tensor) -> Tensor:
    """Return log p - log q."""
    return p_logprobs_N - q_logprobs_N


def k2(p_logprobs_N: Tensor, q_logprobs_N: Tensor) -> Tensor:
    """Return (log p - log q)^2 / 2."""
    return (p_logprobs_N - q_logprobs_N).square() / 2


def k3(p_logprobs_N: Tensor, q_logprobs_N: Tensor) -> Tensor:
    """Return q/p - 1 - log(q/p)."""
    log_ratio_N = q_logprobs_N - p_logprobs_N
    return log_ratio_N.expm1() - log_ratio_N


def unbiased(p_logprobs_N: Tensor, q_logprobs_N: Tensor, sampler_logprobs_N: Tensor) -> Tensor:
    """Return p / sampler * k3, with gradient through both factors."""
    return ratio(p_logprobs_N - sampler_logprobs_N) * k3(p_logprobs_N, q_logprobs_N)


def reference_penalty(
    logprobs_N: Tensor,
    ref_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    estimator: str = "k3",
    cap: float = LOG_RATIO_LIMIT,
    mask_N: Tensor | None = None,
) -> Tensor:
    """Return the penalty of the policy against the reference.

    Log q/p above `cap` nats counts as `cap`, without gradient, so that one token cannot dominate; masked tokens are 0.

    Raises:
        ValueError: there is no such estimator.
    """
    towards_ref_N = log_ratio(ref_logprobs_N, logprobs_N, mask_N)
    capped_N = towards_ref_N.clamp(-LOG_RATIO_LIMIT, min(cap, LOG_RATIO_LIMIT))
    if estimator == "k1":
        return -capped_N
    if estimator == "k2":
        return capped_N.square() / 2
    k3_N = capped_N.expm1() - capped_N
    if estimator == "k3":
        return k3_N
    if estimator == "unbiased":
        weighted_N = ratio(log_ratio(logprobs_N, sampler_logprobs_N, mask_N)) * k3_N
        return torch.where(towards_ref_N > cap, weighted_N.detach(), weighted_N)
    raise ValueError(f"reference_penalty: estimator must be k1, k2, k3 or unbiased, got {estimator!r}")
