"""Which policy versions are evaluated, and which snapshots must stay for it. Pure: no queue, no files.

The driver asks and the actor keeps; both know the schedule, so that weights which are still to be evaluated stay
although the driver has not come to them yet:

    kept = those that the driver has in hand  +  those of the schedule that it has not looked at yet
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

KEPT_KEY = "evaluation_kept"
"""Key of the control plane under which the driver says what it has in hand."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSchedule:
    """The versions that are evaluated: the first, the last, every `interval_steps`-th (0: none), those of `versions`.

    has_prompts: whether there are held-out prompts; without any nothing is evaluated.
    max_waiting: versions that wait for the one in hand; see `without_surplus`.
    """

    num_steps: int
    interval_steps: int = 0
    versions: Collection[int] = ()
    has_prompts: bool = True
    max_waiting: int = 4

    def wants(self, version: int) -> bool:
        """Return whether a version is to be evaluated."""
        if not self.has_prompts:
            return False
        is_due = bool(self.interval_steps) and version % self.interval_steps == 0
        return version in (0, self.num_steps) or version in self.versions or is_due

    def due(self, after: int, up_to: int) -> list[int]:
        """Return the versions beyond `after`, up to `up_to`, that are to be evaluated, in order."""
        return [version for version in range(after + 1, up_to + 1) if self.wants(version)]

    def without_surplus(self, waiting: Sequence[int]) -> list[int]:
        """Return the waiting versions without the oldest ones beyond `max_waiting`; named ones and the last stay."""
        surplus = len(waiting) - self.max_waiting
        kept = []
        for version in waiting:
            if surplus > 0 and version not in self.versions and version != self.num_steps:
                surplus -= 1
            else:
                kept.append(version)
        return kept


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the driver has in hand: versions up to `seen` stay only if they are among `versions`."""

    seen: int = -1
    versions: frozenset[int] = field(default_factory=frozenset)
    incarnation: int = 0

    def to_value(self) -> dict[str, Any]:
        """Return what is set under `KEPT_KEY`."""
        return {"seen": self.seen, "versions": sorted(self.versions), "incarnation": self.incarnation}

    @classmethod
    def of(cls, value: Any, incarnation: int) -> Kept:
        """Return what a value of `KEPT_KEY` says of an incarnation: nothing if it is of another, or there is none."""
        if value is None or value["incarnation"] != incarnation:
            return cls(incarnation=incarnation)
        return cls(seen=value["seen"], versions=frozenset(value["versions"]), incarnation=incarnation)

    def needs(self, version: int, schedule: EvaluationSchedule) -> bool:
        """Return whether the weights of a version must stay."""
        return version in self.versions or (version > self.seen and schedule.wants(version))
