"""Decides when requests may be sent to servers: not while paused, not while weights are replaced, not once aborted.

    generate:  gate.enter(mark)          waits while paused or held; False when the round was aborted
    adopt:     with gate.hold(): ...      new requests wait; those at the servers are the servers' affair
    abort:     gate.abort()              ends the rounds that were begun before it

It knows nothing of servers. A request is never sent while paused: SGLang loses the abort of such a one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from relax.errors import ServiceError


class SubmissionGate:
    """Many submitters, one holder at a time. Every wait ends by `deadline_s`."""

    def __init__(self, deadline_s: float = 600.0) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._paused = False
        self._held = False
        self._num_aborts = 0

    @property
    def paused(self) -> bool:
        """Whether `pause` was called and `resume` was not."""
        return self._paused

    def pause(self) -> None:
        """Let no further request pass."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """Let requests pass again."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def abort(self) -> None:
        """End every round begun so far, also one that waits in `enter`."""
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

    def enter(self, mark: int) -> bool:
        """Wait until a request may be sent; False when its round was aborted.

        Raises:
            ServiceError: The pause or the holder lasted longer than the deadline.
        """
        with self._changed:
            self._wait(lambda: self.aborted(mark) or not (self._paused or self._held), "it is paused or held")
            return not self.aborted(mark)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep requests back inside the block.

        Raises:
            ServiceError: Another holder lasted longer than the deadline.
        """
        with self._changed:
            self._wait(lambda: not self._held, "another holds it")
            self._held = True
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], why: str) -> None:
        started = time.monotonic()
        if not self._changed.wait_for(ready, self._deadline_s):
            waited_s = time.monotonic() - started
            raise ServiceError(
                f"SubmissionGate: must open within {self._deadline_s:.0f} s, got {waited_s:.0f} s of waiting; {why}"
            )
