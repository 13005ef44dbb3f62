"""TCP ports of this machine that no other run takes while this process lives, also while nobody listens at them.

A port is free or not only at the instant of asking: a server that dies would find another run's at its old address.
So a run reserves the port first, which other runs respect and other programs do not.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress

from relax.errors import ServiceError

LOOPBACK = "127.0.0.1"


class ReservedPort:
    """One port; given back by `close`, or by the end of the process.

    Args:
        port: Number of it.
        mark: A socket whose name in Linux's abstract namespace says that the port is taken.
    """

    def __init__(self, port: int, mark: socket.socket) -> None:
        self.port = port
        self._mark = mark

    def close(self) -> None:
        """Let others have the port."""
        self._mark.close()


def reserve_port(ports: Iterable[int]) -> ReservedPort:
    """Return the first of some ports at which nobody listens and that no run has reserved.

    Raises:
        ServiceError: There is none.
    """
    tried = []
    for port in ports:
        tried.append(port)
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with suppress(OSError):
            mark.bind(f"\0relax-port-{port}")
            socket.create_server((LOOPBACK, port)).close()
            return ReservedPort(port, mark)
        mark.close()
    raise ServiceError(f"ports: one of {len(tried)} from {min(tried)} to {max(tried)} must be free, got none")
