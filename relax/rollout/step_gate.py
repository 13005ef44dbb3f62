"""Turn-taking between a thread that decodes step by step and threads that pause, abort or re-weight it.

    generate:  with gate.step(): one forward pass        waits while paused or while a writer waits
    adopt:     with gate.between_steps(): new weights     waits for the running step only, also while paused
    abort:     gate.abort()                               ends the rounds that were begun before it

It knows nothing of models.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepGate:
    """One decoder at a time; writers go first. Every wait ends by `deadline_s`."""

    def __init__(self, deadline_s: float = 600.0) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._paused = False
        self._stepping = False
        self._num_writers = 0
        self._writing = False
        self._num_aborts = 0

    def pause(self) -> None:
        """Let no further step begin."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """Let steps begin again."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def abort(self) -> None:
        """End every round begun so far, also one that waits in `step`."""
        with self._changed:
            self._num_aborts += 1
            self._changed.notify_all()

    def begin_round(self) -> int:
        """Return a mark of now: `step` tells rounds begun before an abort from later ones by it."""
        with self._changed:
            return self._num_aborts

    @contextmanager
    def step(self, mark: int) -> Iterator[bool]:
        """Hold the weights still for one step; yields False, and holds nothing, when the round was aborted.

        Raises:
            TimeoutError: The pause or another thread's step lasted longer than the deadline.
        """
        with self._changed:
            self._wait(
                lambda: (
                    self._num_aborts != mark
                    or not (self._paused or self._num_writers or self._writing or self._stepping)
                ),
                "generation could not go on: it is paused or weights are being adopted",
            )
            aborted = self._num_aborts != mark
            if not aborted:
                self._stepping = True
        try:
            yield not aborted
        finally:
            if not aborted:
                with self._changed:
                    self._stepping = False
                    self._changed.notify_all()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Hold off steps and other writers.

        Raises:
            TimeoutError: The running step lasted longer than the deadline.
        """
        with self._changed:
            self._num_writers += 1
            try:
                self._wait(lambda: not (self._stepping or self._writing), "the running step did not end")
                self._writing = True
            finally:
                self._num_writers -= 1
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        started = time.monotonic()
        if not self._changed.wait_for(ready, self._deadline_s):
            waited_s = time.monotonic() - started
            raise TimeoutError(f"StepGate: {what}; waited {waited_s:.1f} s, limit {self._deadline_s:.1f} s")
