"""Scores of tokens from whole logits: the formulas, and what has a gradient. Shared vocabularies: tests/loopback."""

from __future__ import annotations

import pytest
import torch

from relax.train.vocabulary import token_scores

LOGITS = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])


def test_token_scores_are_logprob_and_entropy_at_the_temperature() -> None:
    """By hand, from the distributions."""
    logprobs, entropies = token_scores(LOGITS, torch.tensor([2, 0]), temperature=0.5)
    probabilities = (LOGITS / 0.5).softmax(-1)
    torch.testing.assert_close(logprobs, probabilities[[0, 1], [2, 0]].log())
    torch.testing.assert_close(entropies, -(probabilities * probabilities.log()).sum(-1))


@pytest.mark.parametrize("wanted", [True, False])
def test_entropy_has_a_gradient_only_when_told(wanted) -> None:
    """Logprobs have theirs in both cases."""
    scores = token_scores(LOGITS.clone().requires_grad_(), torch.tensor([2, 0]), entropy_gradient=wanted)
    assert [each.requires_grad for each in scores] == [True, wanted]


def test_broken_logits_of_a_token_that_counts_stay_broken() -> None:
    """The step is then skipped; only what the loss does not look at is mended."""
    logits = torch.tensor([[1.0, torch.nan], [1.0, torch.nan]])
    logprobs, _ = token_scores(logits, torch.tensor([0, 0]), counts_N=torch.tensor([True, False]))
    assert logprobs.isnan().tolist() == [True, False]
