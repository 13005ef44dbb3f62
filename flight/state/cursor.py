"""One consumer's position in a table: what is ready, what is leased, what has been tried how often. Pure data.

It is not the table: rows are made and retired in `flight.table`. What is delivered as one is a *unit*: a row for
a fifo consumer, a whole group for a groups consumer.

    forming --all rows and columns there--> ready --lease--> leased --finish--> gone
                                              ^                 |
                                              +----give_back----+--attempts used up--> dead
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

from flight.errors import InvalidRequestError
from flight.schema import ConsumerSpec, TableSpec
from flight.state.leases import Lease, LeaseBook, Row, Unit, rows_of
from flight.state.ready import Entry, ReadyQueue
from flight.state.snapshots import CursorSnapshot
from flight.state.tally import Tally


class Cursor(LeaseBook):
    """Ready queue and leases of one consumer. Every operation costs O(log rows) a unit at most.

    What concerns many rows is done for all of them at once: a put or a take of rows in order makes a fixed number of
    Python calls, whatever their number.
    """

    def __init__(
        self, consumer: ConsumerSpec, table: TableSpec, *, bit: int, needs: int, lease_prefix: str
    ) -> None:
        super().__init__(consumer.name, lease_prefix)
        self.bit = bit
        self.needs = needs
        """Parts that a row must have to be ready."""
        self.by_group = consumer.sampler == "groups"
        self.by_version = table.staleness is not None and table.staleness.consumer == consumer.name
        """Whether the oldest policy version goes first; otherwise the oldest row does."""
        self.unit_size = table.group_size if self.by_group else 1
        self.units: dict[int | str, Unit] = {}
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
        self._queue: ReadyQueue[Unit] = ReadyQueue(_is_ready, consumer.mix)

    def key(self, row: Row) -> int | str:
        """Return which unit a row belongs to."""
        return row.group_id if self.by_group else row.row_id

    def _version(self, row: Row) -> int:
        return row.version if self.by_version else 0

    def arrive(self, rows: Sequence[Row]) -> None:
        """Note new rows; those whose columns are there are ready at once."""
        self._shift(self.unready, rows, 1)
        self.advance(rows)

    def advance(self, rows: Sequence[Row]) -> None:
        """Make rows ready if the parts that this consumer needs are there; idempotent for those that are ready."""
        rows = [row for row in rows if not self.needs & ~row.parts]
        if self.by_group:
            self._join_groups(rows)
            return
        rows = [row for row in rows if row.row_id not in self.units]
        versions = map(attrgetter("version"), rows) if self.by_version else repeat(0)
        units = list(map(Unit, zip(rows), versions))
        self.units.update(zip(map(attrgetter("row_id"), rows), units, strict=True))
        self._shift(self.unready, rows, -1)
        self._enqueue(units)

    def _join_groups(self, rows: Sequence[Row]) -> None:
        whole: list[Unit] = []
        for row in rows:
            unit = self.units.get(row.group_id)
            if unit is None:
                unit = self.units[row.group_id] = Unit((), self._version(row))
            if unit.state != "forming" or row in unit.rows:
                continue
            unit.rows += (row,)
            unit.version = min(unit.version, self._version(row))
            if len(unit.rows) == self.unit_size:
                unit.rows = tuple(sorted(unit.rows, key=attrgetter("row_id")))
                unit.state = "ready"
                whole.append(unit)
        self._shift(self.unready, rows_of(whole), -1)
        self._enqueue(whole)
        if self._skip_equal:
            labels = ([row.labels.get(self._skip_equal) for row in unit.rows] for unit in whole)
            self.uniform += [unit for unit, values in zip(whole, labels, strict=True) if _are_equal(values)]

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
        return next(iter(self.pop_many(1)), None)

    def pop_many(self, max_units: int) -> list[Unit]:
        """Remove and return the oldest ready units; `push` or `lease` must follow."""
        units = self._queue.pop_many(max_units)
        self._shift(self.ready, units, -self.unit_size)
        return units

    def push(self, units: Sequence[Unit]) -> None:
        """Put units that were popped back into the queue, in their old places."""
        self._shift(self.ready, units, self.unit_size)
        for label, entries in self._entries(units).items():
            self._queue.unpop_many(entries, label)

    def pick(self, row_ids: Collection[int]) -> list[Unit]:
        """Remove and return the ready units of these rows, wherever they stand; `push` or `lease` must follow."""
        wanted = set(row_ids)
        picked: list[Unit] = []
        others: list[Unit] = []
        while wanted and (units := self.pop_many(-(-len(wanted) // self.unit_size))):
            for unit in units:
                is_whole = wanted.issuperset(row.row_id for row in unit.rows)
                (picked if is_whole else others).append(unit)
            wanted.difference_update(row.row_id for row in rows_of(units))
        self.push(others)
        return picked

    def lease(
        self,
        units: list[Unit],
        *,
        member: str,
        version: int,
        deadline: float,
        max_staleness: int | None = None,
        lease_id: str = "",
    ) -> Lease:
        """Hand popped units to a member until `deadline`. `lease_id` is new unless it is given."""
        lease_id = lease_id or self.next_lease_id()
        lease = Lease(lease_id, member, version, deadline, max_staleness, self._by_key(units))
        num_again = 0
        for unit in units:
            num_again += unit.attempts > 0
            unit.state = "leased"
            unit.attempts += 1
            unit.lease_id = lease.lease_id
        self.counts["redelivered"] += num_again * self.unit_size
        self.open(lease)
        self.leased.shift(version, len(units) * self.unit_size)
        self.counts["taken"] += len(units) * self.unit_size
        return lease

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
        if uids is None:
            lease.units.clear()
        else:
            for key in self._by_key(chosen):
                del lease.units[key]
        self.leased.shift(lease.version, -(len(chosen) * self.unit_size))
        lease.num_closed += len(chosen) * self.unit_size
        if not lease.units:
            self.close(lease)
        return chosen

    def expired(self, now: float) -> list[Lease]:
        """Remove and return the leases whose deadline has passed; their units stay for `give_back`."""
        lost = self.pop_expired(now)
        for lease in lost:
            self.leased.shift(lease.version, -(len(lease.units) * self.unit_size))
        return lost

    def give_back(self, units: Iterable[Unit], max_attempts: int) -> tuple[list[Row], list[Row]]:
        """Queue detached units again; return the rows that are ready again and the rows tried too often."""
        dead: list[Unit] = []
        again: list[Unit] = []
        for unit in units:
            (dead if unit.attempts >= max_attempts else again).append(unit)
        self._enqueue(again)
        return rows_of(again), rows_of(dead)

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
        left = tuple(each for each in unit.rows if each is not row)
        if left:
            # A new object: the queue may still hold the old one, and skips it because it is gone.
            self.units[key] = Unit(left, min(map(self._version, left)), attempts=unit.attempts)
            if unit.state != "forming":
                self._shift(self.unready, left, 1)
        self._queue.compact(len(self.units))
        lease_id = unit.lease_id if unit.state == "leased" else ""
        unit.state = "gone"
        return lease_id

    def is_leased(self, row: Row) -> bool:
        """Return whether a live lease holds the row."""
        unit = self.units.get(self.key(row))
        return unit is not None and unit.state == "leased" and row in unit.rows

    def revive(self, rows: list[Row]) -> None:
        """Queue a unit that was finished again, as if it had never been tried."""
        unit = Unit(tuple(rows), min(map(self._version, rows)))
        self.units[self.key(rows[0])] = unit
        self._enqueue([unit])

    def held_until(self, row: Row) -> float | None:
        """Return the deadline of the live lease that holds the row, None if none does."""
        return self.leases[self.units[self.key(row)].lease_id].deadline if self.is_leased(row) else None

    def finish(self, units: Iterable[Unit]) -> None:
        """Forget detached units."""
        by_key = self.units
        for unit in units:
            row = unit.rows[0]
            by_key.pop(row.group_id if self.by_group else row.row_id, None)

    def _by_key(self, units: Iterable[Unit]) -> dict[int | str, Unit]:
        """Return units by the key of their rows."""
        if self.by_group:
            return {unit.rows[0].group_id: unit for unit in units}
        return {unit.rows[0].row_id: unit for unit in units}

    def _shift(self, tally: Tally, items: Sequence[Row] | Sequence[Unit], change: int) -> None:
        """Add `change` for each row or unit to a tally by version, which one consumer alone tells apart."""
        if not self.by_version:
            tally.shift(0, change * len(items))
            return
        for version, number in Counter([item.version for item in items]).items():
            tally.shift(version, change * number)

    def _enqueue(self, units: Sequence[Unit]) -> None:
        for unit in units:
            unit.state = "ready"
        self._shift(self.ready, units, self.unit_size)
        for label, entries in self._entries(units).items():
            self._queue.extend(entries, label)

    def _entries(self, units: Sequence[Unit]) -> dict[Any, list[Entry[Unit]]]:
        """Return units as sorted entries of the queue, by what their first row says about the mix."""
        entries = sorted([(unit.version, unit.rows[0].row_id, unit) for unit in units])
        if not self._mix_column:
            return {None: entries} if entries else {}
        by_label: dict[Any, list[Entry[Unit]]] = {}
        for entry in entries:
            label = self._queue.source(entry[2].rows[0].labels.get(self._mix_column))
            by_label.setdefault(label, []).append(entry)
        return by_label

    def _remove_leased(self, unit: Unit) -> None:
        lease = self.leases[unit.lease_id]
        del lease.units[self.key(unit.rows[0])]
        self.leased.shift(lease.version, -self.unit_size)
        lease.num_closed += self.unit_size
        if not lease.units:
            self.close(lease)


def _is_ready(unit: Unit) -> bool:
    return unit.state == "ready"


def capture_cursor(cursor: Cursor) -> CursorSnapshot:
    """Return what does not follow from the rows of the table."""
    tried = [unit for unit in cursor.units.values() if unit.attempts]
    return CursorSnapshot(
        counts=dict(cursor.counts),
        tried_row_ids=[unit.rows[0].row_id for unit in tried],
        tried_attempts=[unit.attempts for unit in tried],
        leases=cursor.capture_leases(),
        closed=cursor.capture_closed(),
    )


def restore_cursor(cursor: Cursor, snapshot: CursorSnapshot, rows: Mapping[int, Row]) -> None:
    """Take back what `capture_cursor` returned into an empty cursor; `rows` are those of the table, oldest first."""
    cursor.counts = Counter(snapshot.counts)
    cursor.restore_closed(snapshot.closed)
    for held in snapshot.leases:
        lease = Lease(held.lease_id, held.member, held.version, held.deadline, held.max_staleness)
        lease.num_closed = held.num_closed
        lease.units = _held_units(cursor, [rows[row_id] for row_id in held.row_ids], held.lease_id)
        cursor.units |= lease.units
        cursor.open(lease)
        cursor.leased.shift(lease.version, len(held.row_ids))
    leased = set(cursor.units)
    cursor.arrive(
        [row for row in rows.values() if row.pending & cursor.bit and cursor.key(row) not in leased]
    )
    for row_id, attempts in zip(snapshot.tried_row_ids, snapshot.tried_attempts, strict=True):
        cursor.units[cursor.key(rows[row_id])].attempts = attempts
    cursor.uniform.clear()


def _held_units(cursor: Cursor, rows: Iterable[Row], lease_id: str) -> dict[int | str, Unit]:
    """Return the units of a lease by key, made of its rows."""
    members: dict[int | str, list[Row]] = {}
    for row in rows:
        members.setdefault(cursor.key(row), []).append(row)
    return {
        key: Unit(tuple(each), min(map(cursor._version, each)), "leased", lease_id=lease_id)
        for key, each in members.items()
    }


def _are_equal(values: list[Any]) -> bool:
    """Return whether all values are the same number; an absent value or NaN equals nothing."""
    return values[0] is not None and all(each == values[0] for each in values)
