"""Rows, the units that they are delivered as, and the leases of one consumer: live, expiring, closed. Pure data.

It does not know what is ready or in which order: that is `flight.state.cursor`, which is a book of leases with a queue.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from flight.errors import LeaseLostError
from flight.state.snapshots import LeaseSnapshot

CLOSED_LEASES_KEPT = 4096
"""Closed leases remembered a consumer, so that a repeated ack or nack is answered and not refused."""


class Row(msgspec.Struct, eq=False, gc=False):
    """One row's state. `parts` and `pending` are bit sets: parts that are there, consumers not finished yet.

    `labels` are the values of the columns that a sampler looks at, as far as they have come. There are as many of
    these as rows, so they are made in C and the garbage collector leaves them out: they point at no other.
    """

    row_id: int
    uid: str
    group_id: str
    version: int
    parts: int
    pending: int
    put_at: float = 0.0
    labels: dict[str, Any] = {}
    given_up: bool = False
    dead: int = 0
    """Bit set of the consumers of which the row is a dead letter."""
    num_made: int = 0
    """Rows that were put under the tickets for this row."""


class Unit(msgspec.Struct, eq=False, gc=False):
    """Rows delivered together. `version` is the oldest policy_version_start among them."""

    rows: tuple[Row, ...]
    version: int
    state: Literal["forming", "ready", "leased", "gone"] = "forming"
    attempts: int = 0
    lease_id: str = ""


@dataclass(slots=True, eq=False)
class Lease:
    """Units held by `member` until `deadline`.

    version: the policy version that they are taken for.
    max_staleness: the bound that held then; None unless the consumer is the one that it holds for.
    """

    lease_id: str
    member: str
    version: int
    deadline: float
    max_staleness: int | None = None
    units: dict[int | str, Unit] = field(default_factory=dict)
    num_closed: int = 0

    def rows(self) -> list[Row]:
        """Return the rows still held, in the order of delivery."""
        return rows_of(self.units.values())

    def capture(self) -> LeaseSnapshot:
        """Return the lease as plain data."""
        return LeaseSnapshot(
            lease_id=self.lease_id,
            member=self.member,
            version=self.version,
            deadline=self.deadline,
            max_staleness=self.max_staleness,
            num_closed=self.num_closed,
            row_ids=[row.row_id for row in self.rows()],
        )

    def attempts(self) -> list[int]:
        """Return how often each of the rows was delivered, this time included."""
        return [unit.attempts for unit in self.units.values() for _ in unit.rows]


def rows_of(units: Iterable[Unit]) -> list[Row]:
    """Return the rows of units, in order."""
    return [row for unit in units for row in unit.rows]


class LeaseBook:
    """The leases of one consumer, by id and by deadline; those that were closed whole are remembered for a while."""

    def __init__(self, name: str, lease_prefix: str) -> None:
        self.name = name
        self.leases: dict[str, Lease] = {}
        self._expiries: list[tuple[float, str]] = []
        self._closed: OrderedDict[str, int] = OrderedDict()
        self._lease_prefix = lease_prefix
        self._num_leases = 0

    def next_lease_id(self) -> str:
        """Return an id that no lease had before."""
        self._num_leases += 1
        return f"{self._lease_prefix}{self.name}-{self._num_leases}"

    def capture_leases(self) -> list[LeaseSnapshot]:
        """Return the live leases as plain data."""
        return [lease.capture() for lease in self.leases.values()]

    def capture_closed(self) -> list[tuple[str, int]]:
        """Return the leases that were closed whole and how many rows each held, oldest first."""
        return list(self._closed.items())

    def restore_closed(self, closed: Iterable[tuple[str, int]]) -> None:
        """Take back what `capture_closed` returned."""
        self._closed = OrderedDict(closed)

    def open(self, lease: Lease) -> None:
        """Keep a lease until its deadline."""
        self.leases[lease.lease_id] = lease
        heapq.heappush(self._expiries, (lease.deadline, lease.lease_id))

    def renew(self, lease_id: str, deadline: float) -> None:
        """Move a live lease's deadline."""
        lease = self.find(lease_id)
        lease.deadline = deadline
        heapq.heappush(self._expiries, (deadline, lease_id))

    def find(self, lease_id: str) -> Lease:
        """Return a live lease.

        Raises:
            LeaseLostError: it has expired, or there never was one of that name.
        """
        lease = self.leases.get(lease_id)
        if lease is None:
            raise LeaseLostError(
                f"consumer {self.name!r}: lease must be live, got {lease_id!r}, which is unknown or has expired; "
                "its rows go to the next taker"
            )
        return lease

    def closed(self, lease_id: str) -> int | None:
        """Return how many rows a lease held that was acked or nacked whole, None if it is not remembered."""
        return self._closed.get(lease_id)

    def is_due(self, now: float) -> bool:
        """Return whether a lease may have expired."""
        return bool(self._expiries) and self._expiries[0][0] <= now

    def pop_expired(self, now: float) -> list[Lease]:
        """Remove and return the leases whose deadline has passed."""
        lost = []
        while self._expiries and self._expiries[0][0] <= now:
            _, lease_id = heapq.heappop(self._expiries)
            lease = self.leases.get(lease_id)
            if lease is not None and lease.deadline <= now:
                del self.leases[lease_id]
                lost.append(lease)
        return lost

    def next_expiry(self) -> float | None:
        """Return when the next lease may expire, None if none is held."""
        while self._expiries and self._expiries[0][1] not in self.leases:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def void(self, lease_ids: Iterable[str]) -> None:
        """Forget leases that have lost all rows; an ack of one is refused, not answered as a repetition."""
        for lease_id in lease_ids:
            self._closed.pop(lease_id, None)

    def close(self, lease: Lease) -> None:
        """Forget a lease whose rows are all finished or given back, but not that it was there."""
        del self.leases[lease.lease_id]
        self._closed[lease.lease_id] = lease.num_closed
        while len(self._closed) > CLOSED_LEASES_KEPT:
            self._closed.popitem(last=False)
