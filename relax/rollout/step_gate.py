"""Turn-taking between a thread that decodes step by step and threads that pause, abort or re-weight it.

    generate:  with gate.step(): one forward pass        waits while paused or while a writer waits
    adopt:     with gate.between_steps(): new weights     waits for the running step only, also while paused
    abort:     gate.abort()                               ends the rounds that were begun before it

It knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from relax.rollout.round_gate import RoundGate


class StepGate(RoundGate):
    """One decoder at a time; writers go first. Every wait ends by `deadline_s`."""

    def __init__(self, deadline_s: float = 600.0) -> None:
        super().__init__(deadline_s)
        self._stepping = False
        self._num_writers = 0
        self._writing = False

    @contextmanager
    def step(self, mark: int) -> Iterator[bool]:
        """Hold the weights still for one step; yields False, and holds nothing, when the round was aborted.

        Raises:
            TimeoutError: The pause or another thread's step lasted longer than the deadline.
        """
        with self._changed:
            self._wait_or_raise(
                lambda: (
                    self.aborted(mark)
                    or not (self._paused or self._num_writers or self._writing or self._stepping)
                ),
                "generation could not go on: it is paused or weights are being adopted",
            )
            aborted = self.aborted(mark)
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
                self._wait_or_raise(
                    lambda: not (self._stepping or self._writing), "the running step did not end"
                )
                self._writing = True
            finally:
                self._num_writers -= 1
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _wait_or_raise(self, ready: Callable[[], bool], what: str) -> None:
        waited_s = self._wait(ready)
        if waited_s is not None:
            raise TimeoutError(f"StepGate: {what}; waited {waited_s:.1f} s, limit {self._deadline_s:.1f} s")
