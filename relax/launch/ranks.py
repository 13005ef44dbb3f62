"""The environment in which the ranks of one trainer find each other, as torch.distributed reads it.

The driver starts each rank as a service of its own (`actor-0`, `actor-1`, ...): the supervisor shows it, logs it and
reports its death, which is the role's. They meet at a TCP port of rank 0 that is reserved for them.
"""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass

from relax.launch.ports import LOOPBACK, ReservedPort, reserve_port

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
    reserved: ReservedPort | None
    """The port at which rank 0 listens; one rank needs none."""

    @classmethod
    def on_this_machine(cls, num_ranks: int) -> Rendezvous:
        """Return a meeting point at a port of its own.

        Raises:
            ServiceError: No port is free.
        """
        if num_ranks == 1:
            return cls(num_ranks, None)
        # Below the range from which the kernel serves connections: nobody gets it by chance before rank 0 listens.
        return cls(num_ranks, reserve_port(random.sample(PORTS, len(PORTS))))

    def close(self) -> None:
        """Let others meet there."""
        if self.reserved is not None:
            self.reserved.close()

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables of one rank; none when there is but one."""
        if self.reserved is None:
            return {}
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self.reserved.port),
            # Gloo would look the machine's name up, which need not lead to an interface.
            "GLOO_SOCKET_IFNAME": "lo",
        }
