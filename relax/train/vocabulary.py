"""From logits to the logprob of the token that was sampled and the entropy of its distribution.

    log p_t = z_t - log sum_v exp z_v        H = log sum_v exp z_v - sum_v p_v z_v

With tensor parallel ranks each has the logits of its part of the vocabulary. They share three numbers a token (largest
logit, sum of exponentials, logit of the token) and a fourth for the entropy, instead of the logits.

Shapes: N tokens, W words of this rank's part of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from relax.algorithms.entropy import LEAST_LOGPROB, entropy
from relax.train.ranks import SumOverRanks


@dataclass(frozen=True)
class VocabularyPart:
    """The words from `first` on are here; the rest are on the other ranks of the group."""

    first: int
    group: Any


def token_scores(
    logits_NW: Tensor,
    token_ids_N: Tensor,
    *,
    temperature: float = 1.0,
    counts_N: Tensor | None = None,
    entropy_gradient: bool = True,
    part: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor]:
    """Return logprobs and entropies [N] in nats and fp32, the same on all ranks of the part's group.

    Args:
        logits_NW: Of any float type.
        token_ids_N: Tokens that were sampled, of the whole vocabulary.
        temperature: Logits are divided by it.
        counts_N: bool, tokens that the loss looks at; the logits of others may be anything. None: all count.
        entropy_gradient: Whether the entropies take part in the loss.
        part: Which words are here; None: all.
    """
    if counts_N is not None:
        # log_softmax would turn one NaN into a NaN gradient of its row, whatever is done to the row's loss.
        logits_NW = logits_NW.masked_fill(~(counts_N | _finite(logits_NW, part))[:, None], 0.0)
    scaled_NW = logits_NW.float() if temperature == 1.0 else logits_NW.float() / temperature
    if part is not None:
        return _shared_scores(scaled_NW, token_ids_N, part, entropy_gradient)
    log_probs_NW = scaled_NW.log_softmax(-1)
    logprobs_N = log_probs_NW.gather(1, token_ids_N[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        return logprobs_N, entropy(log_probs_NW)


def _shared_scores(
    scaled_NW: Tensor, token_ids_N: Tensor, part: VocabularyPart, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    largest_N = scaled_NW.detach().amax(-1)
    dist.all_reduce(largest_N, op=dist.ReduceOp.MAX, group=part.group)
    shifted_NW = scaled_NW - largest_N[:, None]
    mass_NW = shifted_NW.exp()
    place_N = token_ids_N - part.first
    is_here_N = (place_N >= 0) & (place_N < scaled_NW.shape[1])
    chosen_N = shifted_NW.gather(1, place_N.clamp(0, scaled_NW.shape[1] - 1)[:, None])[:, 0]
    sums_2N = torch.stack((mass_NW.sum(-1), chosen_N.masked_fill(~is_here_N, 0.0)))
    total_N, chosen_N = SumOverRanks.apply(sums_2N, part.group)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # A word of logit minus infinity has no mass and adds nothing, where 0 times infinity would be NaN.
        weighted_N = (mass_NW * shifted_NW.clamp(min=LEAST_LOGPROB)).sum(-1)
        entropy_N = total_N.log() - SumOverRanks.apply(weighted_N, part.group) / total_N
    return chosen_N - total_N.log(), entropy_N


def _finite(logits_NW: Tensor, part: VocabularyPart | None) -> Tensor:
    """Return which rows are finite over the whole vocabulary."""
    finite_N = logits_NW.isfinite().all(-1)
    if part is None:
        return finite_N
    everywhere_N = finite_N.to(torch.int32)
    dist.all_reduce(everywhere_N, op=dist.ReduceOp.MIN, group=part.group)
    return everywhere_N.bool()
