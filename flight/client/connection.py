"""One address, one Flight client, our own errors: reconnects where that is safe. It knows no verbs.

It may be shared by threads but not with a forked process: any Flight call in a forked child hangs (pyarrow 26).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import pyarrow as pa
import pyarrow.flight as paflight

from flight import messages as m
from flight.client.patience import PATIENCE_S, waits
from flight.errors import DeadlineExceededError, FlightQueueError, InvalidRequestError, UnavailableError

TRANSFER_S = 15.0
"""Seconds beyond a call's deadline in which data may still arrive, or a hung server be noticed."""

# With the default bandwidth probe, unread streams can grow a client's memory without bound under load (pyarrow 26).
_OPTIONS: list[tuple[str, int | str]] = [("grpc.http2.bdp_probe", 0), ("grpc.http2.max_frame_size", 1 << 20)]

T = TypeVar("T")


class Connection:
    """Connects on first use, and anew after `close` or a dropped connection.

    `patience_s` is how long calls that are safe to repeat, and streams, try to reach a server that does not answer.
    """

    def __init__(self, uri: str, *, patience_s: float = PATIENCE_S) -> None:
        self.uri = uri
        self.patience_s = patience_s
        self._client: paflight.FlightClient | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def repeat(self, where: str, call: Callable[[paflight.FlightClient], T], *, retry: bool = True) -> T:
        """Do a call, again on a new connection if the old one dropped and `retry` says that it may be repeated.

        Raises:
            UnavailableError: no server answers at the address.
            DeadlineExceededError: it answers too late.
            FlightQueueError: whatever the server refuses, as the class of its code.
        """
        if os.getpid() != self._pid:
            raise InvalidRequestError(
                f"{where}: the client must be used in the process that made it, got a forked one; spawn processes"
            )
        tries = waits(self.patience_s)
        while True:
            client = self._connected(where)
            try:
                with self.errors(where):
                    return call(client)
            except UnavailableError:
                self._forget(client)
                delay_s = next(tries, None) if retry else None
                if delay_s is None:
                    raise
            time.sleep(delay_s)

    def _connected(self, where: str) -> paflight.FlightClient:
        with self._lock:
            if self._client is None:
                try:
                    self._client = paflight.FlightClient(self.uri, generic_options=_OPTIONS)
                except (pa.ArrowException, OSError) as error:
                    raise InvalidRequestError(
                        f"{where}: uri must be like grpc://127.0.0.1:8815, got {self.uri!r} ({error})"
                    ) from error
            return self._client

    def _forget(self, client: paflight.FlightClient) -> None:
        with self._lock:
            if self._client is client:
                self._client = None
        with suppress(pa.ArrowException):
            client.close()

    @contextmanager
    def errors(self, where: str) -> Iterator[None]:
        """Turn what goes wrong inside into our errors, as `repeat` raises them."""
        try:
            yield
        except FlightQueueError:
            raise
        except paflight.FlightTimedOutError as error:
            raise DeadlineExceededError(
                f"{where}: {self.uri} must answer within the deadline plus {TRANSFER_S:.0f} s, got no answer"
            ) from error
        except (paflight.FlightUnavailableError, paflight.FlightCancelledError) as error:
            raise UnavailableError(
                f"{where}: a server must answer at {self.uri}, got none; start one with `python -m flight serve`"
            ) from error
        except (pa.ArrowException, paflight.FlightError, OSError) as error:
            ours = m.to_error(getattr(error, "extra_info", None))
            if ours is None:
                ours = FlightQueueError(f"{where}: {self.uri} must be a queue server, got: {error}")
            raise ours from error


def within(deadline_s: float) -> paflight.FlightCallOptions:
    """Return options for a call that the server answers by `deadline_s`."""
    return paflight.FlightCallOptions(timeout=deadline_s + TRANSFER_S)
