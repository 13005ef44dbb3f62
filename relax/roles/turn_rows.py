"""Rows of agents between the table `rollouts` and the trainer: with a loss mask there, without observed tokens here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from modalities.packing import unpack_present
from relax.agents.config import AgentConfig
from relax.agents.rows import TurnRow, alike, spread, turn_row
from relax.models.inputs import Encoded, PromptInputs
from relax.train.batch import TrainBatch


@dataclass(frozen=True, kw_only=True)
class TurnRows:
    """Rows of several turns, light columns only."""

    rows: Sequence[TurnRow]
    loss_masks: Sequence[np.ndarray]
    groups: np.ndarray
    prompt_of_row: np.ndarray
    logprobs: Sequence[np.ndarray]
    stale: Sequence[np.ndarray] | None

    @classmethod
    def of(cls, table: pa.Table) -> TurnRows:
        """Return the rows of the table `rollouts`."""
        masks = masks_of(table)
        columns = (unpack_present(table[name]) for name in ("prompt_token_ids", "completion_token_ids"))
        rows = [turn_row(*each) for each in zip(*columns, masks, strict=True)]
        group_ids = table["group_id"].to_pylist()
        number = {group_id: index for index, group_id in enumerate(dict.fromkeys(group_ids))}
        stale = stale_tokens(table)
        return cls(
            rows=rows,
            loss_masks=masks,
            groups=np.array([number[group_id] for group_id in group_ids], np.int32),
            prompt_of_row=alike(rows, table["media_ids"].to_pylist()),
            logprobs=_sampled(unpack_present(table["rollout_logprobs"]), masks),
            stale=None if stale is None else _sampled(stale, masks),
        )

    @property
    def first_rows(self) -> list[int]:
        """The first row of each prompt."""
        return np.unique(self.prompt_of_row, return_index=True)[1].tolist()

    def batch(self, media: Sequence[Mapping[str, Sequence[Encoded]]], **columns: Any) -> TrainBatch:
        """Return the training batch.

        Args:
            media: Of each prompt; none where another rank trains it.
            columns: The other fields of the batch.
        """
        return TrainBatch(
            prompts=[
                PromptInputs(token_ids=self.rows[row].prompt_token_ids, media=each)
                for row, each in zip(self.first_rows, media, strict=True)
            ],
            groups=self.groups,
            prompt_of_row=self.prompt_of_row,
            early_places=[row.early_places for row in self.rows],
            completion_token_ids=[row.completion_token_ids for row in self.rows],
            rollout_logprobs=self.logprobs,
            stale_tokens=self.stale,
            **columns,
        )


def agent_reads(config: AgentConfig) -> list[str]:
    """Return the columns that the actor needs besides, of rows of agents."""
    return ["loss_mask"] if config.is_on else []


def masks_of(table: pa.Table) -> list[np.ndarray]:
    """Return which tokens of each completion were sampled."""
    return [np.array(row, bool) for row in table["loss_mask"].to_pylist()]


def in_whole(table: pa.Table, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Return the trainer's values at their places in the whole completions, 0 where the policy observed."""
    if "loss_mask" not in table.column_names:
        return values
    return [spread(each, mask) for each, mask in zip(values, masks_of(table), strict=True)]


def stale_tokens(table: pa.Table) -> list[np.ndarray] | None:
    """Return which tokens of each row the queue marked as too old; None under the policies that let none through."""
    if "stale_tokens" not in table.column_names:
        return None
    return [np.array(row, bool) for row in table["stale_tokens"].to_pylist()]


def _sampled(values: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [each[mask] for each, mask in zip(values, masks, strict=True)]
