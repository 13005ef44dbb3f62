"""The course of a run: which attempt at its steps this is, and after which step it began. Pure.

A run that goes back to a checkpoint begins a new *incarnation*: versions after the checkpoint are taken back, and will
be other weights under the same numbers. So a version is known by both, and whatever an earlier incarnation still
has in hand (rollouts, announcements) is told from the present by the incarnation.

    driver: sets COURSE_KEY to the new course -> each rollout service drops what it has in hand and says so under its
    fence key -> driver takes the queue back -> the actor announces the checkpoint's version of the new incarnation
"""

from __future__ import annotations

from typing import Any

import msgspec

from relax.control.messages import Count

COURSE_KEY = "course"


class Course(msgspec.Struct, frozen=True):
    """Incarnation from 0, and the optimizer step after which it began; 0 is the beginning of the run."""

    incarnation: Count = 0
    step: Count = 0

    @classmethod
    def of(cls, value: Any) -> Course:
        """Return the course that a value of `COURSE_KEY` describes; None is the first one.

        Raises:
            msgspec.ValidationError: it is no course.
        """
        return cls() if value is None else msgspec.convert(value, cls)

    def to_value(self) -> dict[str, int]:
        """Return what is set under `COURSE_KEY`."""
        return {"incarnation": self.incarnation, "step": self.step}

    def next(self, step: int) -> Course:
        """Return the course of a run that goes back to `step`."""
        return Course(self.incarnation + 1, step)

    def snapshot_name(self, policy_version: int) -> str:
        """Return the directory of published weights: of another name in each incarnation, as they are other weights."""
        return f"{policy_version:06d}" + (f"-{self.incarnation}" if self.incarnation else "")


def fence_key(member: str) -> str:
    """Return the key under which a member says which incarnation it has come to."""
    return f"fenced/{member}"
