"""Which rewards a run has and how they are run. It loads no plug-in."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from relax.errors import ConfigError

ON_FAILURE = ("drop_group", "use_value")
RESERVED_LABELS = ("error",)


@dataclass(kw_only=True)
class RewardPart:
    """One reward of the weighted sum."""

    name: str
    """A reward of ours or of an installed package by name, or yours as `package.module:function` or `:Class`."""
    weight: float = 1.0
    """Factor in the sum; 0: recorded only."""
    label: str | None = None
    """Its column is `reward_<label>`; absent: the name, or what follows its colon."""
    time_limit_s: float | None = None
    """Longest time of one attempt in seconds; absent: that of the section."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the plug-in takes beside the sample."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z_]\w{0,63}", self.key, re.ASCII) or self.key in RESERVED_LABELS:
            raise ConfigError(
                f"rollout.reward.parts: label must be letters, digits and '_' and not 'error', got {self.key!r}"
            )
        if not math.isfinite(self.weight):
            raise ConfigError(f"rollout.reward.parts: weight of {self.key} must be finite, got {self.weight}")
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise ConfigError(
                f"rollout.reward.parts: time_limit_s of {self.key} must be above 0, got {self.time_limit_s}"
            )

    @property
    def key(self) -> str:
        """Return the label, given or not."""
        return self.label if self.label is not None else self.name.rpartition(":")[2]

    @property
    def column(self) -> str:
        """Return the name of the column that records it."""
        return f"reward_{self.key}"


def _default_parts() -> list[RewardPart]:
    return [RewardPart(name="exact_match")]


@dataclass(kw_only=True)
class RewardConfig:
    """The reward of a completion: the weighted sum of its parts. `rollout.reward=NAME` is short for one part."""

    parts: list[RewardPart] = field(default_factory=_default_parts)
    """What is added up. A list in a later file or word replaces the whole list."""
    time_limit_s: float = 10.0
    """Longest time of one attempt in seconds, unless the part has its own."""
    retries: int = 2
    """Further attempts after one that failed, with pauses between them that grow and vary by chance."""
    workers: int = 2
    """Worker processes for rewards that may hang or crash; started when first needed."""
    worker_memory_bytes: int = 4 << 30
    """Most memory of a worker process; 0: no limit."""
    max_in_flight: int = 16
    """Requests to remote rewards at the same time."""
    on_failure: str = "drop_group"
    """What a failure costs after all retries: `drop_group`: the group, as a row error; `use_value`: the row gets
    `failed_reward`, and the reason in column `reward_error`."""
    failed_reward: float = 0.0
    """Reward of a row that failed, with `on_failure=use_value`."""

    def __post_init__(self) -> None:
        for key, value, minimum in (
            ("retries", self.retries, 0),
            ("workers", self.workers, 1),
            ("worker_memory_bytes", self.worker_memory_bytes, 0),
            ("max_in_flight", self.max_in_flight, 1),
        ):
            if value < minimum:
                raise ConfigError(f"rollout.reward.{key}: must be at least {minimum}, got {value}")
        if not self.time_limit_s > 0:
            raise ConfigError(f"rollout.reward.time_limit_s: must be above 0, got {self.time_limit_s}")
        if not math.isfinite(self.failed_reward):
            raise ConfigError(f"rollout.reward.failed_reward: must be finite, got {self.failed_reward}")
        if self.on_failure not in ON_FAILURE:
            raise ConfigError(
                f"rollout.reward.on_failure: must be one of {', '.join(ON_FAILURE)}, got {self.on_failure!r}"
            )
        if not any(part.weight for part in self.parts):
            raise ConfigError(
                f"rollout.reward.parts: must hold a part with a weight other than 0, got {len(self.parts)} without"
            )
        keys = [part.key for part in self.parts]
        if len(set(keys)) < len(keys):
            raise ConfigError(
                f"rollout.reward.parts: labels must differ, got {keys}; give one of them a label of its own"
            )

    @property
    def labels(self) -> list[str]:
        """Return the label of each part, in order."""
        return [part.key for part in self.parts]

    def limit_s(self, part: RewardPart) -> float:
        """Return the longest time of one attempt at `part`."""
        return self.time_limit_s if part.time_limit_s is None else part.time_limit_s
