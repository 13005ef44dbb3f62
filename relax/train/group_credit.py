"""Advantages and returns of whole groups from their columns, before anything looks at a training batch. No model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.credit import Outcome, raw_credit
from relax.train.objective import per_token


@dataclass(frozen=True, kw_only=True)
class GroupOutcome:
    """Rows of whole groups. Per-token columns are float32 [num_completion_tokens] for each row."""

    group_ids: Sequence[str]
    rewards: np.ndarray
    """float32 [num_rows]."""
    rollout_logprobs: Sequence[np.ndarray]
    ref_logprobs: Sequence[np.ndarray] | None = None
    values: Sequence[np.ndarray] | None = None


@dataclass(frozen=True, kw_only=True)
class GroupCredit:
    """float32 [num_completion_tokens] for each row; returns where a critic learns."""

    advantages: list[np.ndarray]
    returns: list[np.ndarray] | None


def group_credit(outcome: GroupOutcome, algorithm: AlgorithmConfig) -> GroupCredit:
    """Return the advantages that the trainer would begin with.

    Raises:
        ValueError: values or reference logprobs are needed and not there.
    """
    number = {group_id: index for index, group_id in enumerate(dict.fromkeys(outcome.group_ids))}
    num_tokens_R = torch.tensor([len(row) for row in outcome.rollout_logprobs])
    credit = raw_credit(
        Outcome(
            rewards_R=torch.from_numpy(np.array(outcome.rewards, np.float32)),
            groups_R=torch.tensor([number[group_id] for group_id in outcome.group_ids]),
            num_tokens_R=num_tokens_R,
            row_C=torch.arange(len(num_tokens_R)).repeat_interleave(num_tokens_R),
            rollout_logprobs_C=per_token(outcome.rollout_logprobs),
            ref_logprobs_C=None if outcome.ref_logprobs is None else per_token(outcome.ref_logprobs),
            values_C=None if outcome.values is None else per_token(outcome.values),
        ),
        algorithm,
    )
    lengths = num_tokens_R.tolist()
    of_rows = [
        None if each is None else [part.numpy() for part in each.split(lengths)]
        for each in (credit.advantages_C, credit.returns_C)
    ]
    return GroupCredit(advantages=of_rows[0] or [], returns=of_rows[1])
