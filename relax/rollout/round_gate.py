"""What the gates of both engines have in common: pausing, resuming, and ending the rounds that were begun.

It knows neither steps nor servers: what may go on at the same time is the matter of the gate that derives from it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class RoundGate:
    """Pauses and aborts rounds of generation. Every wait ends by `deadline_s`."""

    def __init__(self, deadline_s: float = 600.0) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._paused = False
        self._num_aborts = 0

    @property
    def paused(self) -> bool:
        """Whether `pause` was called and `resume` was not."""
        return self._paused

    def pause(self) -> None:
        """Let nothing further begin."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """Let things begin again."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def abort(self) -> None:
        """End every round begun so far, also one that waits."""
        with self._changed:
            self._num_aborts += 1
            self._changed.notify_all()

    def begin_round(self) -> int:
        """Return a mark of now: rounds begun before an abort are told from later ones by it."""
        with self._changed:
            return self._num_aborts

    def aborted(self, mark: int) -> bool:
        """Whether the round was ended."""
        return self._num_aborts != mark

    def _wait(self, ready: Callable[[], bool]) -> float | None:
        """Wait for a condition under the lock; returns the seconds waited if it did not come in time, else None."""
        started = time.monotonic()
        return None if self._changed.wait_for(ready, self._deadline_s) else time.monotonic() - started
