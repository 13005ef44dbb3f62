"""What a reward is made of: what it sees, what it returns, where it runs and how it fails.

The plainest plug-in is a function `f(RewardInput) -> float | RewardResult`. One with options is a dataclass that
derives from `Reward`: its fields are the options.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, Literal

from relax.errors import RelaxError

Place = Literal["inline", "process", "thread"]
"""Where a reward runs: `inline`: in the rollout service, for cheap rules without regular expressions; `process`: in a
worker process that is killed at the time limit; `thread`: waiting for somebody else, with a deadline of its own."""


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    """What a reward may look at."""

    prompt_text: str
    completion_text: str
    """Special tokens left out."""
    reference_answer: str
    finish_reason: str = "stop"
    """stop, length or abort."""
    modality: str = ""
    num_completion_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """A finite reward, or the reason why there is none (then `reward` is 0 and must not be used)."""

    reward: float
    error: str = ""


class RewardFailedError(RelaxError, RuntimeError):
    """A reward that could not be given, for a reason that the completion is not to blame for.

    Args:
        reason: The rule and what came.
        retry: Whether another attempt may end otherwise.
    """

    def __init__(self, reason: str, *, retry: bool = True) -> None:
        super().__init__(reason)
        self.retry = retry


class Reward(abc.ABC):
    """A callable `RewardInput -> float | RewardResult`. Whatever it raises costs its row, never the run."""

    place: ClassVar[Place] = "process"
    deterministic: ClassVar[bool] = False
    """Whether the same input always ends the same way; then what failed or was too slow is not tried again."""
    reward_at_limit: ClassVar[float | None] = None
    """Reward of a completion on which time or memory ran out; None: that is a failure."""

    @abc.abstractmethod
    def __call__(self, sample: RewardInput) -> float | RewardResult:
        """Return the reward of one completion."""

    def check(self) -> None:
        """Check, once before a run, that what the reward needs is there; raise ValueError if not."""
        return

    def warm_up(self) -> None:
        """Import and load what is slow, before the first time limit begins."""
        return


class BoundedReward(Reward):
    """A reward that is told how long it may take, and ends by itself."""

    @abc.abstractmethod
    def bounded(self, sample: RewardInput, time_limit_s: float) -> float | RewardResult:
        """Return the reward of one completion within `time_limit_s`."""

    def __call__(self, sample: RewardInput) -> float | RewardResult:
        """Return the reward of one completion, in a minute at most."""
        return self.bounded(sample, 60.0)
