"""Flight servers over one broker, one of which listens: how a server gets a new certificate without ending.

A Flight server has its certificates from its construction (pyarrow 26). So the old one is shut down, which stops it
listening at once and lets its open calls end, and a new one is made on the same port. In the milliseconds between the
two a connection is refused, which clients take for a server that is not there and try again where they may.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import pyarrow as pa
import structlog

LISTEN_S = 2.0
"""Seconds in which the port must be free again; after that it is tried anew at each look."""

RETRY_S = 0.002

LOG = structlog.get_logger("flight.server.faces")


class Face(Protocol):
    """A Flight server of ours."""

    port: int

    def shutdown(self) -> None:
        """Stop listening, and return once the open calls have ended."""

    def stop(self, grace_s: float) -> bool:
        """End, waiting for open calls up to `grace_s`; return whether all have ended."""


class Faces:
    """The server that listens, and those before it that still have open calls. For one thread.

    Args:
        first: the one that listens now.
        make: makes another, on the same port and over the same broker.
    """

    def __init__(self, first: Face, make: Callable[[int], Face]) -> None:
        self.port = first.port
        self._current: Face | None = first
        self._former: list[tuple[Face, threading.Thread]] = []
        self._make = make

    def renew(self) -> bool:
        """Listen anew; return whether it is done. If not, nobody listens, and it is to be tried again."""
        if self._current is not None:
            ending = threading.Thread(target=self._current.shutdown, name="former-face", daemon=True)
            self._former.append((self._current, ending))
            self._current = None
            ending.start()
        self._former = [(face, thread) for face, thread in self._former if thread.is_alive()]
        ends_at = time.monotonic() + LISTEN_S
        while self._current is None:
            try:
                self._current = self._make(self.port)
            except (pa.ArrowException, OSError) as error:
                if time.monotonic() > ends_at:
                    LOG.error("the port cannot be listened on any more", port=self.port, error=str(error))
                    return False
                time.sleep(RETRY_S)
        LOG.info("new connections have the new certificate", num_former=len(self._former))
        return True

    @property
    def is_listening(self) -> bool:
        """Whether new connections are taken."""
        return self._current is not None

    def stop(self, grace_s: float) -> bool:
        """Refuse new calls and wait up to `grace_s` for those that are open; return whether all have ended."""
        ends_at = time.monotonic() + grace_s
        faces = [self._current] if self._current is not None else []
        faces += [face for face, _ in self._former]
        ended = [face.stop(max(0.0, ends_at - time.monotonic())) for face in faces]
        return all(ended)
