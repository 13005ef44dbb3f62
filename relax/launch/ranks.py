"""The environment in which the ranks of one trainer find each other, as torch.distributed reads it.

The driver starts each rank as a service of its own (`actor-0`, `actor-1`, ...): the supervisor shows it, logs it and
reports its death, which is the role's. They meet at a TCP port of rank 0 that was free a moment ago.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from dataclasses import dataclass

from relax.errors import ServiceError

LOOPBACK = "127.0.0.1"
PORTS = range(20_000, 32_000)
"""Where ranks may meet."""
BACKLOG = 1024
"""Ranks that may ask to be let in at the same time."""


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at one address, by default at any free port.

    For the store at which ranks meet: torch's own (2.13) listens at every address of the machine, and trusts whoever
    comes.

    Raises:
        OSError: the address is not of this machine, or the port is not free.
    """
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place[:2], family=family, backlog=BACKLOG)


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one trainer on this machine meet."""

    num_ranks: int
    port: int

    @classmethod
    def on_this_machine(cls, num_ranks: int) -> Rendezvous:
        """Return a meeting point at a free port; one rank needs none."""
        if num_ranks == 1:
            return cls(num_ranks, 0)
        # Below the range from which the kernel serves connections: nobody gets it by chance before rank 0 listens.
        for port in random.sample(PORTS, len(PORTS)):
            with socket.socket() as probe, suppress(OSError):
                probe.bind((LOOPBACK, port))
                return cls(num_ranks, port)
        raise ServiceError(f"ranks: a port of {PORTS} must be free, got none")

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables of one rank; none when there is but one."""
        if self.num_ranks == 1:
            return {}
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self.port),
            # Gloo would look the machine's name up, which need not lead to an interface.
            "GLOO_SOCKET_IFNAME": "lo",
        }
