"""A count by policy version that forgets zeros, so that old versions do not pile up."""

from __future__ import annotations

from collections import Counter


class Tally(Counter[int]):
    """Counts that go up and down and are never negative."""

    def shift(self, key: int, change: int) -> None:
        """Add `change` to the count of `key`."""
        self[key] += change
        if not self[key]:
            del self[key]
