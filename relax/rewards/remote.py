"""Reward `http`: a service of yours scores the completion.

POST url  {"prompt_text": …, "completion_text": …, "reference_answer": …, "finish_reason": …, "modality": …,
           "num_completion_tokens": …}
200       {"reward": 0.5}   or   {"error": "why there is none"}
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from relax.errors import ConfigError
from relax.rewards.base import BoundedReward, RewardFailedError, RewardInput
from relax.rewards.web import check_url, post_json


class RemoteAnswer(msgspec.Struct, frozen=True):
    """What the service says."""

    reward: float | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Remote(BoundedReward):
    """Return what the service says. Safe for several threads."""

    place = "thread"

    url: str
    """Where to post."""
    token_file: str = ""
    """File with a bearer token, read at each call; absent: none is sent."""
    max_answer_bytes: int = 1 << 20
    """A longer answer is a failure."""

    def __post_init__(self) -> None:
        check_url(self.url)

    def check(self) -> None:
        """Look for the token."""
        read_token(self.token_file)

    def bounded(self, sample: RewardInput, time_limit_s: float) -> float:
        """Ask once."""
        answer = post_json(
            self.url,
            sample,
            deadline_s=time_limit_s,
            max_answer_bytes=self.max_answer_bytes,
            token=read_token(self.token_file),
        )
        try:
            told = msgspec.json.decode(answer, type=RemoteAnswer)
        except msgspec.DecodeError as error:
            raise RewardFailedError(f"the answer must be {{'reward': number}}, got {error}") from error
        if told.error or told.reward is None:
            raise RewardFailedError(told.error or "the answer must be {'reward': number}, got none")
        return told.reward


def read_token(path: str) -> str:
    """Return the token in a file, '' without a file.

    Raises:
        ConfigError: it cannot be read.
    """
    if not path:
        return ""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"token_file: must be a file that can be read, got {error}") from error
