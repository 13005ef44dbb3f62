"""Rows in the trainer's form, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from relax.agents.rows import alike, spread, turn_row

PROMPT = np.array([1, 2], np.int32)
COMPLETION = np.array([3, 4, 9, 5, 9, 9, 6, 7], np.int32)
MASK = np.array([1, 1, 0, 1, 0, 0, 1, 1], bool)


def test_turn_row_moves_all_but_the_last_turn_into_the_prompt() -> None:
    """The tokens of earlier turns are found there again."""
    row = turn_row(PROMPT, COMPLETION, MASK)
    assert row.prompt_token_ids.tolist() == [1, 2, 3, 4, 9, 5, 9, 9]
    assert row.early_places.tolist() == [2, 3, 5]
    assert row.completion_token_ids.tolist() == [3, 4, 5, 6, 7]
    assert row.prompt_token_ids[row.early_places].tolist() == row.completion_token_ids[:3].tolist()


def test_turn_row_of_one_turn_is_as_it_was() -> None:
    """The prompt is the prompt."""
    row = turn_row(PROMPT, np.array([3, 4]), np.ones(2, bool))
    assert (row.prompt_token_ids.tolist(), row.early_places.tolist()) == ([1, 2], [])
    assert row.completion_token_ids.tolist() == [3, 4]


@pytest.mark.parametrize("mask", [[1, 0], [1], []])
def test_turn_row_refuses_a_mask_that_cannot_be(mask: list[int]) -> None:
    """Of another length, or with nothing sampled at the end."""
    with pytest.raises(ValueError, match="for each of 2 tokens and end with True"):
        turn_row(PROMPT, np.array([3, 4]), np.array(mask, bool))


def test_alike_rows_share_a_prompt() -> None:
    """Equal in tokens, in whose they are, and in media."""
    one = turn_row(PROMPT, COMPLETION, MASK)
    other = turn_row(PROMPT, COMPLETION, np.array([0, 1, 0, 1, 0, 0, 1, 1], bool))
    assert alike([one, one, other, one], [["m"], ["m"], ["m"], ["n"]]).tolist() == [0, 0, 1, 2]


def test_spread_puts_values_back_at_their_places() -> None:
    """Zeros where the policy observed."""
    assert spread(np.array([1.0, 2, 3, 4, 5]), MASK).tolist() == [1, 2, 0, 3, 0, 0, 4, 5]
