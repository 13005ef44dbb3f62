"""Logprobs and entropies over a vocabulary that two processes share are those of one, and so are their gradients."""

from __future__ import annotations

import json
import sys

import torch

from relax.train.vocabulary import token_scores
from tests.kit.trainer_ranks import rank_processes
from tests.kit.vocabulary_ranks import COUNTS, TEMPERATURE, made_up, weighted


def test_shared_vocabulary_gives_the_scores_and_gradients_of_a_whole_one() -> None:
    """Large logits, an impossible word and a broken row that does not count included; both ranks know all scores."""
    with rank_processes(2, [sys.executable, "-m", "tests.kit.vocabulary_ranks"]) as ranks:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    told = [json.loads(output.splitlines()[-1]) for output in outputs]
    logits, token_ids = made_up()
    logits.requires_grad_()
    logprobs, entropies = token_scores(logits, token_ids, temperature=TEMPERATURE, counts_N=COUNTS)
    weighted(logprobs, entropies).backward()
    for rank in told:
        torch.testing.assert_close(torch.tensor(rank["logprobs"]), logprobs.detach())
        torch.testing.assert_close(torch.tensor(rank["entropies"]), entropies.detach())
    gradient = torch.cat([torch.tensor(rank["gradient"]) for rank in told], dim=1)
    torch.testing.assert_close(gradient, logits.grad)
    assert logits.grad[:5].abs().max() > 0.1
    assert logits.grad[5].abs().max() == 0
