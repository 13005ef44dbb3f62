"""What every policy loss is given and what it gives.

Shapes: N tokens (the completion tokens of whole rows, row after row).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from relax.algorithms.ratios import log_ratio


@dataclass(frozen=True)
class LossInputs:
    """Tokens with all that losses look at. Make it by `of`, which keeps masked tokens from being seen."""

    logprobs_N: Tensor
    """Under the weights that are trained; with gradient."""
    log_ratio_N: Tensor
    """`logprobs_N` minus those of the proximal policy; with gradient."""
    advantages_N: Tensor
    row_N: Tensor
    """Row of each token, whole numbers from 0."""
    mask_N: Tensor | None = None
    """False: the token does not count; its loss and gradient are 0."""

    @classmethod
    def of(
        cls,
        logprobs_N: Tensor,
        proximal_logprobs_N: Tensor,
        advantages_N: Tensor,
        row_N: Tensor,
        mask_N: Tensor | None = None,
    ) -> LossInputs:
        """Return the inputs with zeros at masked tokens, whatever stood there."""
        if mask_N is not None:
            logprobs_N = logprobs_N.masked_fill(~mask_N, 0.0)
            advantages_N = advantages_N.masked_fill(~mask_N, 0.0)
        return cls(
            logprobs_N, log_ratio(logprobs_N, proximal_logprobs_N, mask_N), advantages_N, row_N, mask_N
        )


@dataclass(frozen=True)
class PolicyLoss:
    """Loss of each token, the ratio that made it, and whether a clip took or changed its gradient."""

    loss_N: Tensor
    ratio_N: Tensor
    """Without gradient."""
    clipped_N: Tensor
