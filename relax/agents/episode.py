"""One episode: its transcript, its environment and how it ended. It calls nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from modalities.base import Encoded
from relax.agents.environment import Task
from relax.agents.transcript import Transcript
from relax.rollout.engine import FinishReason


@dataclass(frozen=True, kw_only=True)
class Start:
    """What an episode begins with: the task, and the prompt as the preprocess service made it."""

    task: Task
    token_ids: np.ndarray
    media: Mapping[str, Sequence[Encoded]] = field(default_factory=dict)
    media_ids: Sequence[str] = ()
    sample_index: int = 0

    @property
    def uid(self) -> str:
        return self.task.uid


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How turns are sampled."""

    max_new_tokens: int
    """Limit for one turn."""
    temperature: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class Episode:
    """An episode on its way."""

    def __init__(self, start: Start, world: Any = None) -> None:
        self.start = start
        self.world = world
        """The environment."""
        self.transcript = Transcript(start.token_ids, start.media, start.media_ids)
        self.texts: list[str] = []
        """What the policy said, turn by turn."""
        self.reward = 0.0
        self.info: dict[str, float] = {}
        self.error = ""
        """Why there is no reward: the environment or the program failed."""
        self.refusal = ""
        """Why the engine would not go on."""
        self.finish_reason: FinishReason | None = None
        """None while it goes on; stop: the environment or the program ended it; length: a limit did."""
        self.cut = False
        """Whether a program wanted more than the limits allow."""
        self.num_branches = 1
        """Conversations that a program began."""

    @property
    def is_live(self) -> bool:
        return self.finish_reason is None

    @property
    def text(self) -> str:
        """What the policy said, a line a turn."""
        return "\n".join(self.texts)

    @property
    def answer(self) -> str:
        """The last thing that the policy said."""
        return self.texts[-1] if self.texts else ""

    def end(self, reason: FinishReason) -> None:
        """End the episode; the first reason stays."""
        self.finish_reason = self.finish_reason or reason

    def fail(self, error: str) -> None:
        """End the episode without a reward."""
        self.error = self.error or error
        self.end("stop")
