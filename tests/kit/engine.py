"""A fake rollout engine: it has no model and answers what a test wrote down. Real engines are in relax/rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from relax.rollout.engine import Completion, GenerateRequest

Script = Callable[[GenerateRequest], list[Completion]]


class FakeEngine:
    """Answers each request by `script`; adopting weights changes nothing but the version."""

    def __init__(self, script: Script) -> None:
        self.policy_version = 0
        self._script = script

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Return what the script says, request by request."""
        return [completion for request in requests for completion in self._script(request)]

    def adopt(self, snapshot_dir: Path | str, policy_version: int) -> None:
        """Take the version."""
        self.policy_version = policy_version

    def pause(self) -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
