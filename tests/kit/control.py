"""A fake of the control plane's member: a phase that the test sets, and nobody behind it."""

from __future__ import annotations


class FakeMember:
    """A fake: stands in for `relax.control.member.ControlMember` where a role only looks at its phase."""

    def __init__(self, phase: str = "run") -> None:
        self.phase = phase
