"""A fake of a run's services: no process is started, a test says which are running. Real ones are in relax/run."""

from __future__ import annotations


class FakeServices:
    """The rollout services of a run; `running` is what a supervisor would say."""

    def __init__(self, count: int) -> None:
        self._indices = set(range(count))
        self.running: dict[str, int] = {f"rollout-{index}": index + 1 for index in range(count)}
        self.voided: list[str] = []
        self.said: list[str] = []

    def indices(self, role: str) -> set[int]:
        """Return the numbers that there are."""
        return set(self._indices)

    def add(self, role: str, index: int) -> None:
        """Have another one."""
        self._indices.add(index)

    def remove(self, role: str, index: int) -> None:
        """Have one less."""
        self._indices.discard(index)

    def start(self, name: str) -> None:
        """Count it as running."""
        self.running[name] = len(self.running) + 100
