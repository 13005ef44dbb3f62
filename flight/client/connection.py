"""One address, one Flight client, our own errors: reconnects where that is safe. It knows no verbs.

It may be shared by threads but not with a forked process: any Flight call in a forked child hangs (pyarrow 26).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as paflight

from flight import messages as m
from flight.client.credentials import Credentials
from flight.client.patience import PATIENCE_S, waits
from flight.errors import DeadlineExceededError, FlightQueueError, InvalidRequestError, UnavailableError

TRANSFER_S = 15.0
"""Seconds beyond a call's deadline in which data may still arrive, or a hung server be noticed."""

# With the default bandwidth probe, unread streams can grow a client's memory without bound under load (pyarrow 26).
_OPTIONS: list[tuple[str, int | str]] = [("grpc.http2.bdp_probe", 0), ("grpc.http2.max_frame_size", 1 << 20)]

TLS = "grpc+tls://"

T = TypeVar("T")


class Connection:
    """Connects on first use, and anew after `close` or a dropped connection.

    `patience_s` is how long calls that are safe to repeat, and streams, try to reach a server that does not answer.
    """

    def __init__(
        self, uri: str, credentials: Credentials | None = None, *, patience_s: float = PATIENCE_S
    ) -> None:
        self.uri = uri
        self.patience_s = patience_s
        if credentials is not None and not uri.startswith(TLS):
            raise InvalidRequestError(
                f"connection: uri must begin with {TLS} where there are credentials, got {uri!r}; "
                "a token is never sent in the clear"
            )
        self._credentials = credentials or Credentials()
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
                    self._client = paflight.FlightClient(
                        self.uri, generic_options=_OPTIONS, **_options_of(self._credentials)
                    )
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
            way_out = "start one with `python -m flight serve`"
            if self.uri.startswith(TLS):
                way_out += ", or see that it and the credentials are of one authority"
            raise UnavailableError(
                f"{where}: a server must answer at {self.uri}, got none; {way_out}"
            ) from error
        except (pa.ArrowException, paflight.FlightError, OSError) as error:
            ours = m.to_error(getattr(error, "extra_info", None))
            if ours is None:
                ours = FlightQueueError(f"{where}: {self.uri} must be a queue server, got: {error}")
            raise ours from error


class _ShowToken(paflight.ClientMiddlewareFactory):
    """Sends the token with every call."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._headers = {"authorization": f"Bearer {token}"}

    def start_call(self, info: paflight.CallInfo) -> paflight.ClientMiddleware:
        return _Headers(self._headers)


class _Headers(paflight.ClientMiddleware):
    def __init__(self, headers: dict[str, str]) -> None:
        super().__init__()
        self._headers = headers

    def sending_headers(self) -> dict[str, str]:
        return self._headers


def _options_of(credentials: Credentials) -> dict[str, Any]:
    shown = {
        "tls_root_certs": credentials.roots,
        "cert_chain": credentials.certificate,
        "private_key": credentials.key,
        "middleware": [_ShowToken(credentials.token)] if credentials.token else None,
    }
    return {name: value for name, value in shown.items() if value is not None}


def within(deadline_s: float) -> paflight.FlightCallOptions:
    """Return options for a call that the server answers by `deadline_s`."""
    return paflight.FlightCallOptions(timeout=deadline_s + TRANSFER_S)
