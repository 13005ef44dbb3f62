"""One consumer's position in a table: what is ready, what is leased, what has been tried how often. Pure data.

It is not the table: rows are made and retired in `flight.table`. What is delivered as one is a *unit*: a row for
a fifo consumer, a whole group for a groups consumer.

    forming --all rows and columns there--> ready --lease--> leased --finish--> gone
                                              ^                 |
                                              +----give_back----+--attempts used up--> dead
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from flight.errors import InvalidRequestError, LeaseLostError
from flight.schema import ConsumerSpec, TableSpec
from flight.state.ready import ReadyQueue
from flight.state.tally import Tally

CLOSED_LEASES_KEPT = 4096
"""Closed leases remembered a consumer, so that a repeated ack or nack is answered and not refused."""


@dataclass(slots=True, eq=False)
class Row:
    """One row's state. `parts` and `pending` are bit sets: parts that are there, consumers not finished yet.

    `labels` are the values of the columns that a sampler looks at, as far as they have come.
    """

    row_id: int
    uid: str
    group_id: str
    version: int
    parts: int
    pending: int
    given_up: bool = False
    dead: int = 0
    """Bit set of the consumers of which the row is a dead letter."""
    put_at: float = 0.0
    num_made: int = 0
    """Rows that were put under the tickets for this row."""
    labels: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Unit:
    """Rows delivered together. `version` is the oldest policy_version_start among them."""

    rows: list[Row]
    version: int
    state: Literal["forming", "ready", "leased"] = "forming"
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
        return [row for unit in self.units.values() for row in unit.rows]


class Cursor:
    """Ready queue and leases of one consumer. Every operation costs O(log rows) a unit at most."""

    def __init__(
        self, consumer: ConsumerSpec, table: TableSpec, *, bit: int, needs: int, lease_prefix: str
    ) -> None:
        self.name = consumer.name
        self.bit = bit
        self.needs = needs
        """Parts that a row must have to be ready."""
        self.by_group = consumer.sampler == "groups"
        self.by_version = table.staleness is not None and table.staleness.consumer == consumer.name
        """Whether the oldest policy version goes first; otherwise the oldest row does."""
        self.unit_size = table.group_size if self.by_group else 1
        self.units: dict[int | str, Unit] = {}
        self.leases: dict[str, Lease] = {}
        self.unready = Tally()
        """Rows of the table that are not ready yet, by policy_version_start."""
        self.ready = Tally()
        """Ready rows, by the version of their unit."""
        self.leased = Tally()
        """Leased rows, by the policy version that they were taken for."""
        self.counts: Counter[str] = Counter()
        self.uniform: list[Unit] = []
        """Whole groups without any difference in the column `skip_equal`, since the owner last cleared this list."""
        self._mix_column = consumer.mix.column if consumer.mix else ""
        self._skip_equal = consumer.skip_equal
        self._queue: ReadyQueue[Unit] = ReadyQueue(self._is_ready, consumer.mix)
        self._expiries: list[tuple[float, str]] = []
        self._closed: OrderedDict[str, int] = OrderedDict()
        self._lease_prefix = lease_prefix
        self._num_leases = 0

    def key(self, row: Row) -> int | str:
        """Return which unit a row belongs to."""
        return row.group_id if self.by_group else row.row_id

    def _version(self, row: Row) -> int:
        return row.version if self.by_version else 0

    def arrive(self, row: Row) -> None:
        """Note a new row; it is ready at once if its columns are there."""
        self.unready.shift(self._version(row), 1)
        self.advance(row)

    def advance(self, row: Row) -> None:
        """Make a row ready if the parts that this consumer needs are there; idempotent for a unit that is ready."""
        if self.needs & ~row.parts:
            return
        unit = self.units.get(self.key(row))
        if unit is None:
            unit = self.units[self.key(row)] = Unit([], self._version(row))
        if unit.state != "forming" or row in unit.rows:
            return
        unit.rows.append(row)
        unit.version = min(unit.version, self._version(row))
        if len(unit.rows) == self.unit_size:
            unit.rows.sort(key=lambda each: each.row_id)
            for each in unit.rows:
                self.unready.shift(self._version(each), -1)
            self._enqueue(unit)
            if self._skip_equal and _are_equal([row.labels.get(self._skip_equal) for row in unit.rows]):
                self.uniform.append(unit)

    def num_ready(self) -> int:
        """Return how many rows could be taken now."""
        return self.ready.total()

    def num_leased(self) -> int:
        """Return how many rows are held by leases."""
        return self.leased.total()

    def oldest(self) -> Unit | None:
        """Return the next unit without taking it."""
        return self._queue.peek()

    def pop(self) -> Unit | None:
        """Remove and return the oldest ready unit; `push` or `lease` must follow."""
        unit = self._queue.pop()
        if unit is not None:
            self.ready.shift(unit.version, -self.unit_size)
        return unit

    def push(self, units: Iterable[Unit]) -> None:
        """Put units that were popped back into the queue, in their old places."""
        for unit in units:
            self.ready.shift(unit.version, self.unit_size)
            self._queue.unpop(unit, self._order(unit), self._label(unit))

    def lease(
        self,
        units: list[Unit],
        *,
        member: str,
        version: int,
        deadline: float,
        max_staleness: int | None = None,
    ) -> Lease:
        """Hand popped units to a member until `deadline`."""
        self._num_leases += 1
        lease_id = f"{self._lease_prefix}{self.name}-{self._num_leases}"
        lease = Lease(lease_id, member, version, deadline, max_staleness)
        for unit in units:
            unit.state = "leased"
            unit.attempts += 1
            unit.lease_id = lease.lease_id
            self.counts["redelivered"] += self.unit_size if unit.attempts > 1 else 0
            lease.units[self.key(unit.rows[0])] = unit
        self.leases[lease.lease_id] = lease
        self.leased.shift(version, len(units) * self.unit_size)
        self.counts["taken"] += len(units) * self.unit_size
        heapq.heappush(self._expiries, (deadline, lease.lease_id))
        return lease

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

    def detach(self, lease: Lease, uids: set[str] | None) -> list[Unit]:
        """Take units out of a lease: all, or those of `uids`, which must name whole units.

        Raises:
            InvalidRequestError: a uid is not in the lease, or only some rows of a group are named.
        """
        if uids is None:
            chosen = list(lease.units.values())
        else:
            unknown = uids - {row.uid for row in lease.rows()}
            if unknown:
                raise InvalidRequestError(
                    f"consumer {self.name!r}: uids must be rows of lease {lease.lease_id!r}, got {sorted(unknown)[:5]}"
                )
            chosen = [unit for unit in lease.units.values() if unit.rows[0].uid in uids]
            if sum(len(unit.rows) for unit in chosen) != len(uids):
                raise InvalidRequestError(
                    f"consumer {self.name!r}: uids must name whole groups of {self.unit_size} rows, "
                    f"got {len(uids)} rows"
                )
        for unit in chosen:
            del lease.units[self.key(unit.rows[0])]
        self.leased.shift(lease.version, -(len(chosen) * self.unit_size))
        lease.num_closed += len(chosen) * self.unit_size
        if not lease.units:
            self._close(lease)
        return chosen

    def expired(self, now: float) -> list[Lease]:
        """Remove and return the leases whose deadline has passed; their units stay for `give_back`."""
        lost = []
        while self._expiries and self._expiries[0][0] <= now:
            _, lease_id = heapq.heappop(self._expiries)
            lease = self.leases.get(lease_id)
            if lease is not None and lease.deadline <= now:
                del self.leases[lease_id]
                self.leased.shift(lease.version, -(len(lease.units) * self.unit_size))
                lost.append(lease)
        return lost

    def next_expiry(self) -> float | None:
        """Return when the next lease may expire, None if none is held."""
        while self._expiries and self._expiries[0][1] not in self.leases:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def give_back(self, units: Iterable[Unit], max_attempts: int) -> tuple[list[Row], list[Row]]:
        """Queue detached units again; return the rows that are ready again and the rows tried too often."""
        again: list[Row] = []
        dead: list[Row] = []
        for unit in units:
            if unit.attempts >= max_attempts:
                dead += unit.rows
            else:
                self._enqueue(unit)
                again += unit.rows
        return again, dead

    def forget(self, row: Row) -> str:
        """Remove a row wherever it stands. What is left of its group is unready again; its lease shrinks.

        Returns the lease that lost rows, an empty string if none did.
        """
        key = self.key(row)
        unit = self.units.get(key)
        if unit is None or row not in unit.rows:
            self.unready.shift(self._version(row), -1)
            return ""
        del self.units[key]
        if unit.state == "forming":
            self.unready.shift(self._version(row), -1)
        elif unit.state == "ready":
            self.ready.shift(unit.version, -self.unit_size)
        else:
            self._remove_leased(unit)
        left = [each for each in unit.rows if each is not row]
        if left:
            # A new object: the queue may still hold the old one, and skips it because it is not the unit of record.
            self.units[key] = Unit(left, min(map(self._version, left)), attempts=unit.attempts)
            if unit.state != "forming":
                for each in left:
                    self.unready.shift(self._version(each), 1)
        self._queue.compact(len(self.units))
        return unit.lease_id if unit.state == "leased" else ""

    def is_leased(self, row: Row) -> bool:
        """Return whether a live lease holds the row."""
        unit = self.units.get(self.key(row))
        return unit is not None and unit.state == "leased" and row in unit.rows

    def revive(self, rows: list[Row]) -> None:
        """Queue a unit that was finished again, as if it had never been tried."""
        unit = Unit(list(rows), min(map(self._version, rows)))
        self.units[self.key(rows[0])] = unit
        self._enqueue(unit)

    def held_until(self, row: Row) -> float | None:
        """Return the deadline of the live lease that holds the row, None if none does."""
        return self.leases[self.units[self.key(row)].lease_id].deadline if self.is_leased(row) else None

    def void(self, lease_ids: Iterable[str]) -> None:
        """Forget leases that have lost all rows; an ack of one is refused, not answered as a repetition."""
        for lease_id in lease_ids:
            self._closed.pop(lease_id, None)

    def finish(self, unit: Unit) -> None:
        """Forget a detached unit."""
        self.units.pop(self.key(unit.rows[0]), None)

    def _enqueue(self, unit: Unit) -> None:
        unit.state = "ready"
        self.ready.shift(unit.version, self.unit_size)
        self._queue.push(unit, self._order(unit), self._label(unit))

    def _is_ready(self, unit: Unit) -> bool:
        return unit.state == "ready" and self.units.get(self.key(unit.rows[0])) is unit

    def _order(self, unit: Unit) -> tuple[int, int]:
        return unit.version, unit.rows[0].row_id

    def _label(self, unit: Unit) -> Any:
        return unit.rows[0].labels.get(self._mix_column)

    def _remove_leased(self, unit: Unit) -> None:
        lease = self.leases[unit.lease_id]
        del lease.units[self.key(unit.rows[0])]
        self.leased.shift(lease.version, -self.unit_size)
        lease.num_closed += self.unit_size
        if not lease.units:
            self._close(lease)

    def _close(self, lease: Lease) -> None:
        del self.leases[lease.lease_id]
        self._closed[lease.lease_id] = lease.num_closed
        while len(self._closed) > CLOSED_LEASES_KEPT:
            self._closed.popitem(last=False)


def _are_equal(values: list[Any]) -> bool:
    """Return whether all values are the same number; an absent value or NaN equals nothing."""
    return values[0] is not None and all(each == values[0] for each in values)
