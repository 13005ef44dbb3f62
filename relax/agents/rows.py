"""Rows of several turns as the trainer takes them: what came before the last turn is the row's prompt. Numpy only.

    row         prompt | answer 1 | observation | answer 2 |
    loss mask            1 1 1      0 0 0         1 1 1
    trainer     prompt of the row . . . . . . . | completion
    predicted            ^ ^ ^                    ^ ^ ^

Observed tokens are in the prompt alone, so no loss, entropy, penalty or count ever sees them; the tokens of earlier
turns are predicted where they stand in it. Media of any turn are media of the row's prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class TurnRow:
    """One row in the trainer's form."""

    prompt_token_ids: np.ndarray
    """int32: prompt, earlier answers and observations."""
    early_places: np.ndarray
    """int64: where in these the earlier answers' tokens stand."""
    completion_token_ids: np.ndarray
    """int32: all sampled tokens, the last turn's last."""


def turn_row(prompt: np.ndarray, completion: np.ndarray, loss_mask: np.ndarray) -> TurnRow:
    """Return a row in the trainer's form.

    Args:
        prompt: int32 [num_prompt_tokens].
        completion: int32 [num_completion_tokens], observations included.
        loss_mask: bool [num_completion_tokens]; the last one is True.

    Raises:
        ValueError: the mask is not as long as the completion, or does not end with a sampled token.
    """
    if len(loss_mask) != len(completion) or not len(loss_mask) or not loss_mask[-1]:
        raise ValueError(
            f"turn_row: loss_mask must have a value for each of {len(completion)} tokens and end with True, got "
            f"{len(loss_mask)} values"
        )
    observed = np.flatnonzero(~loss_mask)
    last = int(observed[-1]) + 1 if len(observed) else 0
    return TurnRow(
        prompt_token_ids=np.concatenate((prompt, completion[:last])),
        early_places=len(prompt) + np.flatnonzero(loss_mask[:last]),
        completion_token_ids=completion[loss_mask],
    )


def alike(rows: Sequence[TurnRow], media_ids: Sequence[Sequence[str]]) -> np.ndarray:
    """Return the number of each row's prompt, int32, equal for rows that share all of it."""
    numbers: dict[tuple, int] = {}
    keys = [
        (row.prompt_token_ids.tobytes(), row.early_places.tobytes(), tuple(media))
        for row, media in zip(rows, media_ids, strict=True)
    ]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int32)


def spread(values: np.ndarray, loss_mask: np.ndarray) -> np.ndarray:
    """Return values of the sampled tokens at their places in the whole completion, 0 for observed ones."""
    whole = np.zeros(len(loss_mask), values.dtype)
    whole[loss_mask] = values
    return whole
