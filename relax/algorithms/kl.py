"""Estimators of KL(p || q) from samples of p, per token, given both log-probabilities.

All are unbiased but k2; k1 may be negative, k2 and k3 never are; k3 has the lowest variance near p = q.

Source: J. Schulman, Approximating KL Divergence (2020).

Shapes: N tokens sampled from p.
"""

from __future__ import annotations

from torch import Tensor


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


def reference_penalty(logprobs_N: Tensor, ref_logprobs_N: Tensor, cap: float) -> Tensor:
    """Return k3 of policy against reference, the log-ratio cut at `cap` nats so that one token cannot dominate.

    Source: GRPO (arXiv:2402.03300), equation 4; the cut is ours.
    """
    log_ratio_N = (ref_logprobs_N - logprobs_N).clamp(max=cap)
    return log_ratio_N.expm1() - log_ratio_N
