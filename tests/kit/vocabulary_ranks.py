"""Ranks that share a vocabulary and say what they make of made-up logits: `python -m tests.kit.vocabulary_ranks`."""

from __future__ import annotations

import json
from datetime import timedelta

import torch
import torch.distributed as dist

TEMPERATURE = 0.7
NUM_TOKENS, NUM_WORDS = 6, 8
COUNTS = torch.tensor([True, True, True, True, True, False])


def made_up() -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and token ids; one word is impossible, and the last token's logits are broken."""
    generator = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(NUM_TOKENS, NUM_WORDS, generator=generator)
    token_ids = torch.randint(NUM_WORDS, (NUM_TOKENS,), generator=generator)
    token_ids[:2] = torch.tensor([0, NUM_WORDS - 1])
    logits[2, (token_ids[2] + 1) % NUM_WORDS] = -torch.inf
    logits[5, 1] = torch.nan
    return logits, token_ids


def weighted(logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    """Return a number that depends on every score in its own way."""
    weights = torch.arange(1.0, NUM_TOKENS + 1) * COUNTS
    return (weights * (logprobs + 3 * entropies)).sum()


def main() -> None:
    """Score this rank's part, and print scores and the gradient of the own logits."""
    from relax.train.vocabulary import VocabularyPart, token_scores

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=60))
    logits, token_ids = made_up()
    part = logits.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].clone().requires_grad_()
    first = dist.get_rank() * part.shape[1]
    scores = token_scores(
        part,
        token_ids,
        temperature=TEMPERATURE,
        counts_N=COUNTS,
        part=VocabularyPart(first, dist.group.WORLD),
    )
    weighted(*scores).backward()
    logprobs, entropies = (each.tolist() for each in scores)
    print(
        json.dumps({"logprobs": logprobs, "entropies": entropies, "gradient": part.grad.tolist()}), flush=True
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
