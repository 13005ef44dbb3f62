"""Samples for rewards, and scorers that do not pause."""

from __future__ import annotations

from typing import Any

from relax.rewards.base import RewardInput
from relax.rewards.config import RewardConfig, RewardPart
from relax.rewards.scorer import Scorer


def sample(completion: str, reference: str = "red", finish_reason: str = "stop") -> RewardInput:
    """Return what a reward sees of a completion."""
    return RewardInput(
        prompt_text="What colour?",
        completion_text=completion,
        reference_answer=reference,
        finish_reason=finish_reason,
    )


def scorer(*parts: RewardPart, pauses: list[float] | None = None, **settings: Any) -> Scorer:
    """Return a scorer with one worker whose pauses are noted in `pauses` and take no time."""
    noted: list[float] = [] if pauses is None else pauses
    config = RewardConfig(parts=list(parts), **{"workers": 1, **settings})
    return Scorer(config, wait_s=noted.append)
