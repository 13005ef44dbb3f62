"""Puts and open streams whose callers have gone silent: how many puts may be open, how long a caller may be silent, and
how it is ended.

A put holds a thread of the server while it waits for the next batch, and Arrow Flight has no time limit for that read
and no way to cancel it from the server (pyarrow 26; a client's own deadline ends it, but a client may have none). So
the connection of a caller that has been silent for too long is shut down: the read ends, the thread is free, and what
that client does next opens a new connection. Calls that share the connection end with it and may be repeated. A caller
on a unix socket cannot be told from others and is only bounded by the number of open puts.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from flight.errors import OverloadedError

MAX_PUTS = 256
"""Puts that may be open at once."""

IDLE_S = 600.0
"""Seconds that the caller of an open put may be silent."""

LOG = structlog.get_logger("flight.server.idle")


class StreamLimit:
    """Counts open streams of one kind. Thread-safe."""

    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self._left = threading.BoundedSemaphore(max_streams)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Count a stream while it is open.

        Raises:
            OverloadedError: there are too many already.
        """
        if not self._left.acquire(blocking=False):
            raise OverloadedError(
                f"server: open streams must be at most {self._max_streams}, got one more; close some"
            )
        try:
            yield
        finally:
            self._left.release()


class OpenPut:
    """One put, or one open stream. While `silent_since` is set, the server waits for its caller."""

    def __init__(self, peer: str, clock: Callable[[], float], what: str = "put") -> None:
        self.peer = peer
        self.what = what
        self.silent_since: float | None = None
        self._clock = clock

    @contextmanager
    def waiting_for_caller(self) -> Iterator[None]:
        """Count the time inside as the caller's silence."""
        self.silent_since = self._clock()
        try:
            yield
        finally:
            self.silent_since = None


class PutWatch:
    """Counts open puts and cuts off the callers that are silent for too long."""

    def __init__(
        self,
        *,
        max_puts: int = MAX_PUTS,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
        cut: Callable[[str], bool] | None = None,
    ) -> None:
        self.max_puts = max_puts
        self.idle_s = idle_s
        self._clock = clock
        self._cut = cut or cut_connection
        self._lock = threading.Lock()
        self._open: dict[int, OpenPut] = {}
        self._num_puts = 0
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    @contextmanager
    def open(self, peer: str) -> Iterator[OpenPut]:
        """Count a put from an address, and watch it.

        Raises:
            OverloadedError: there are too many already.
        """
        with self._lock:
            if self._num_puts >= self.max_puts:
                raise OverloadedError(
                    f"server: open puts must be at most {self.max_puts}, got one more; close puts that are done"
                )
            self._num_puts += 1
        try:
            with self.watch(peer) as put:
                yield put
        finally:
            with self._lock:
                self._num_puts -= 1

    @contextmanager
    def watch(self, peer: str, what: str = "put") -> Iterator[OpenPut]:
        """Watch the caller of an open stream."""
        stream = OpenPut(peer, self._clock, what)
        with self._lock:
            number = next(self._numbers)
            self._open[number] = stream
        try:
            yield stream
        finally:
            with self._lock:
                del self._open[number]

    @property
    def num_silent(self) -> int:
        """Return for how many callers the server waits."""
        with self._lock:
            return sum(each.silent_since is not None for each in self._open.values())

    def start(self) -> None:
        """Look after the puts in a thread of its own. Idempotent."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="put-watch", daemon=True)
                self._thread.start()

    def look(self) -> int:
        """Cut off the callers that have been silent for too long; return how many connections were found."""
        now = self._clock()
        with self._lock:
            late = [
                put
                for put in self._open.values()
                if put.silent_since is not None and now - put.silent_since >= self.idle_s
            ]
            for put in late:
                put.silent_since = None
        num_cut = 0
        for peer in {put.peer for put in late}:
            is_cut = self._cut(peer)
            num_cut += is_cut
            LOG.warning("a caller was silent for too long", peer=peer, idle_s=self.idle_s, cut_off=is_cut)
        return num_cut

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(min(self.idle_s / 4, 5.0)):
            self.look()


def cut_connection(peer: str) -> bool:
    """Shut down this process's TCP connection to `ipv4:HOST:PORT` or `ipv6:[HOST]:PORT`; return if it was found."""
    kind, _, address = peer.partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return False
    hosts = (host.strip("[]"), f"::ffff:{host}")
    found = False
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            # A copy of the descriptor: shutting it down reaches gRPC, closing it does not.
            copy = os.dup(int(name))
        except OSError:
            continue
        try:
            connection = socket.socket(fileno=copy)
        except OSError:  # No socket; its copy is still ours to close.
            os.close(copy)
            continue
        with connection:
            try:
                remote = connection.getpeername()
                if isinstance(remote, tuple) and remote[0] in hosts and remote[1] == int(port):
                    connection.shutdown(socket.SHUT_RDWR)
                    found = True
            except OSError:
                continue
    return found
