"""How often somebody may call: a bucket that fills with time and from which every call takes one. Pure."""

from __future__ import annotations

BURST_S = 1.0
"""Seconds of its rate that a bucket holds."""


class CallBucket:
    """Allows `calls_per_s` over time, and a second's worth of them at once."""

    def __init__(self, calls_per_s: float, now: float) -> None:
        self._calls_per_s = calls_per_s
        self._most = max(1.0, calls_per_s * BURST_S)
        self._left = self._most
        self._at = now

    def take(self, now: float) -> bool:
        """Return whether a call may be made at `now` (seconds, monotonic); if so it counts."""
        self._left = min(self._most, self._left + (now - self._at) * self._calls_per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
