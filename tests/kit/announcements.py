"""A fake of what the actor's publisher speaks to: it notes announcements, and refuses them if told to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax.config import RunConfig
from relax.control.course import Course
from relax.roles.service import PartClock


class FakeControl:
    """A fake of the control plane and of the queue: who was told of which version, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.paths: dict[int, Path] = {}
        self.error: Exception | None = None

    def announce_policy_version(self, version: int, path: Path, *, incarnation: int) -> None:
        """Note a version, as the control plane gets it; whoever adopts it must find it whole."""
        if self.error is not None:
            raise self.error
        if not (path / "snapshot.json").is_file():
            raise AssertionError(f"{path} was announced before it was whole")
        self.told.append(("control", version))
        self.paths[version] = path

    def get(self, key: str) -> None:
        """Know of nothing that anybody has set."""

    def announce(self, table: str, policy_version: int) -> None:
        """Note a version, as the queue gets it."""
        self.told.append((table, policy_version))


@dataclass
class FakeService:
    """A fake of the actor's service, as far as the publisher uses it."""

    run_dir: Path
    config: RunConfig
    control: FakeControl
    clock: PartClock = field(default_factory=PartClock)
    course: Course = field(default_factory=Course)

    @property
    def queue(self) -> Any:
        return self.control
