"""Decides when requests may be sent to servers: not while paused, not while weights are replaced, not once aborted.

    generate:  gate.enter(mark)          waits while paused or held; False when the round was aborted
    adopt:     with gate.hold(): ...      new requests wait; those at the servers are the servers' affair
    abort:     gate.abort()              ends the rounds that were begun before it

It knows nothing of servers. A request is never sent while paused: SGLang loses the abort of such a one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from relax.errors import ServiceError
from relax.rollout.round_gate import RoundGate


class SubmissionGate(RoundGate):
    """Many submitters, one holder at a time. Every wait ends by `deadline_s`."""

    def __init__(self, deadline_s: float = 600.0) -> None:
        super().__init__(deadline_s)
        self._held = False

    def enter(self, mark: int) -> bool:
        """Wait until a request may be sent; False when its round was aborted.

        Raises:
            ServiceError: The pause or the holder lasted longer than the deadline.
        """
        with self._changed:
            self._wait_or_raise(
                lambda: self.aborted(mark) or not (self._paused or self._held), "it is paused or held"
            )
            return not self.aborted(mark)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep requests back inside the block.

        Raises:
            ServiceError: Another holder lasted longer than the deadline.
        """
        with self._changed:
            self._wait_or_raise(lambda: not self._held, "another holds it")
            self._held = True
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def _wait_or_raise(self, ready: Callable[[], bool], why: str) -> None:
        waited_s = self._wait(ready)
        if waited_s is not None:
            raise ServiceError(
                f"SubmissionGate: must open within {self._deadline_s:.0f} s, got {waited_s:.0f} s of waiting; {why}"
            )
