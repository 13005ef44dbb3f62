"""A clock that tests move by hand."""

from __future__ import annotations


class FakeClock:
    """Call it for the time in seconds; `advance` moves it."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
