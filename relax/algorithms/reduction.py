"""The weights that sum the losses of tokens to one number, fixed before the first micro-batch.

    token_mean      weight = 1 / tokens of the batch
    sequence_mean   weight = 1 / (rows of the batch * tokens of the token's row)
    sequence_sum    weight = 1 / (rows of the batch * constant length)

The loss of a batch is `sum_t weight_t * loss_t`. Rows and tokens are those of the whole batch, over all micro-batches
and all data-parallel ranks (`totals`): gradients are then summed, never averaged, and cutting a batch changes nothing.
Tokens that a mask takes out stay in the denominators, so that no mask makes the others weigh more.

Source: `token_mean`: DAPO (arXiv:2503.14476), section 3.3; `sequence_mean`: GRPO (arXiv:2402.03300), equation 3;
`sequence_sum`: Dr. GRPO (arXiv:2503.20783), section 3.2.

Shapes: R rows, N tokens of them, row after row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """Rows and completion tokens of a whole training batch, over all ranks."""

    num_rows: int
    num_tokens: int


def token_weights(
    num_tokens_R: Tensor, reduction: str, norm_tokens: int | None = None, totals: BatchTotals | None = None
) -> Tensor:
    """Return the weight of every token, [N].

    Args:
        num_tokens_R: Tokens of each row that is here.
        reduction: `token_mean`, `sequence_mean` or `sequence_sum`.
        norm_tokens: Constant length of `sequence_sum`; None: 1.
        totals: Those of the whole batch; None: all of it is here.

    Raises:
        ValueError: there is no such reduction.
    """
    num_here = len(num_tokens_R)
    whole = totals or BatchTotals(num_rows=num_here, num_tokens=int(num_tokens_R.sum()))
    if reduction == "token_mean":
        weight_R = torch.full((num_here,), 1.0 / whole.num_tokens)
    elif reduction == "sequence_mean":
        weight_R = 1.0 / (whole.num_rows * num_tokens_R.float())
    elif reduction == "sequence_sum":
        weight_R = torch.full((num_here,), 1.0 / (whole.num_rows * (norm_tokens or 1)))
    else:
        raise ValueError(
            f"token_weights: reduction must be token_mean, sequence_mean or sequence_sum, got {reduction!r}"
        )
    return weight_R.repeat_interleave(num_tokens_R)
