"""The weights of tokens against hand-computed numbers, and over parts of a batch."""

from __future__ import annotations

import pytest
import torch

from relax.algorithms.config import REDUCTIONS
from relax.algorithms.reduction import BatchTotals, token_weights

LENGTHS = torch.tensor([1, 3])


def test_token_weights_reduce_as_they_say() -> None:
    """Rows of one and of three tokens."""
    torch.testing.assert_close(token_weights(LENGTHS, "token_mean"), torch.full((4,), 0.25))
    expected = torch.tensor([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    torch.testing.assert_close(token_weights(LENGTHS, "sequence_mean"), expected)
    torch.testing.assert_close(token_weights(LENGTHS, "sequence_sum"), torch.full((4,), 0.5))
    torch.testing.assert_close(token_weights(LENGTHS, "sequence_sum", 10), torch.full((4,), 0.05))
    with pytest.raises(
        ValueError, match="reduction must be token_mean, sequence_mean or sequence_sum, got 'sum'"
    ):
        token_weights(LENGTHS, "sum")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ranks_with_the_whole_batch_s_totals_weigh_as_one_process(reduction) -> None:
    """Rows split unevenly: each rank has the weights that its tokens have in the whole batch."""
    lengths = torch.tensor([1, 3, 2, 5, 4])
    totals = BatchTotals(num_rows=5, num_tokens=15)
    parts = [token_weights(part, reduction, 8, totals) for part in (lengths[:1], lengths[1:])]
    torch.testing.assert_close(torch.cat(parts), token_weights(lengths, reduction, 8))
