"""A subscription that outlives its streams: when one breaks, the next is opened, for as long as the client is patient.

Leases do not outlive theirs: the server takes back what was not finished, and delivers it again. An ack of such a lease
is refused (`LeaseLostError`), like one that came after the lease had expired.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from flight.client.patience import waits
from flight.client.subscription import PushedLease, Subscription
from flight.errors import FlightQueueError, UnavailableError


class LastingSubscription:
    """Leases as they come; iterate, or call `next_lease`. Threads may share it; ends when the table does.

    Made by `QueueClient.subscribe`. Iteration stops when the table is sealed and empty.
    """

    def __init__(
        self, subscribe: Callable[[int | None], Subscription], *, idle_deadline_s: float, patience_s: float
    ) -> None:
        self._subscribe = subscribe
        self._idle_deadline_s = idle_deadline_s
        self._patience_s = patience_s
        self._policy_version: int | None = None
        self._is_closed = False
        self.num_resumed = 0
        """How often a stream broke and another took its place."""
        self._stream = subscribe(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PushedLease:
        lease = self.next_lease()
        if lease is None:
            raise StopIteration
        return lease

    def next_lease(self, deadline_s: float | None = None) -> PushedLease | None:
        """Return the next lease, None if no row will ever come; waits up to `deadline_s` (`idle_deadline_s`).

        Raises:
            DeadlineExceededError: no rows came in time, or the server found this subscriber silent.
            UnavailableError: the server is gone, and has not come back while this client was patient.
        """
        ends_at = time.monotonic() + (self._idle_deadline_s if deadline_s is None else deadline_s)
        while True:
            stream = self._stream
            try:
                return stream.next_lease(max(0.0, ends_at - time.monotonic()))
            except UnavailableError as error:
                if self._is_closed:
                    return None
                self._resume(stream, error)

    @property
    def is_sealed(self) -> bool:
        """Return whether the server has said that no row will ever come."""
        return self._stream.is_sealed

    def adopt(self, policy_version: int) -> None:
        """Say which policy version this subscriber generates from, or trains for, from now on."""
        self._policy_version = policy_version
        with suppress(UnavailableError):  # the next stream begins with it
            self._stream.adopt(policy_version)

    def grant(self, *, rows: int = 0, num_bytes: int = 0) -> None:
        """Let the server push more than what acks and nacks grant anew by themselves; until the stream breaks."""
        self._stream.grant(rows=rows, num_bytes=num_bytes)

    def close(self) -> None:
        """End the stream; leases that are not finished go back. Idempotent."""
        self._is_closed = True
        self._stream.close()

    def _resume(self, broken: Subscription, problem: FlightQueueError) -> None:
        """Open another stream in the place of a broken one, unless another thread has done so."""
        tries = waits(self._patience_s)
        while self._stream is broken:
            delay_s = next(tries, None)
            if delay_s is None:
                raise problem
            time.sleep(delay_s)
            broken.close()
            try:
                opened = self._subscribe(self._policy_version)
            except UnavailableError as error:
                problem = error
                continue
            if self._is_closed or self._stream is not broken:
                opened.close()
                return
            self._stream = opened
            self.num_resumed += 1
