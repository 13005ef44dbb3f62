"""One table: the life of its rows from put to retirement, as a pure state machine.

It knows no sockets, locks, threads, clocks or data: time is an argument, values live in `flight.data.store`, waiting in
`flight.broker`, what one table means for another (tickets, staleness) in `flight.state.ledger`. Which rows there are
is kept in `flight.state.rows`, how they leave in `flight.state.table_keeping`, each consumer's queue and leases in
`flight.state.cursor`.

    put --> a row exists; each writer delivers one *part* of it (the columns of that writer)
        --> ready for a consumer once the parts with its columns are there (and its group is whole)
        --> leased to a member until a deadline, then
              ack                      finished for this consumer
              nack(requeue), expiry    ready again; after max_attempts deliveries: dead (requeue: ready again)
              nack(requeue=False)      skipped
        --> retired once every consumer is finished with it: its memory is freed, its uid is remembered for a while
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from flight.errors import InvalidRequestError
from flight.schema import TableSpec
from flight.state.cursor import Cursor, capture_cursor, restore_cursor
from flight.state.leases import Lease, Row, Unit, rows_of
from flight.state.snapshots import TableSnapshot
from flight.state.table_keeping import Event, TableKeeping


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """row_ids and, a row, the bit set of the parts that this put added (0 for a duplicate)."""

    row_ids: list[int]
    new_parts: list[int]
    arrived: list[Row]

    @property
    def num_duplicates(self) -> int:
        """Return how many rows of the put changed nothing."""
        return self.new_parts.count(0)

    def rows_with_new(self, part: int) -> list[int]:
        """Return row_ids with -1 in place of rows to which the put added nothing of a part, given as a bit."""
        if len(self.arrived) == len(self.row_ids):
            return self.row_ids
        new = zip(self.row_ids, self.new_parts, strict=True)
        return [row_id if added & part else -1 for row_id, added in new]


class TableState(TableKeeping):
    """The rows of one table and the consumers' cursors over them. Not thread-safe."""

    def __init__(self, spec: TableSpec, *, lease_prefix: str = "") -> None:
        super().__init__(spec, lease_prefix=lease_prefix)
        self.last_step: dict[str, int] = {}
        """The optimizer step of each consumer's last ack that named one."""

    # ---- looking ----------------------------------------------------------------------------------------------

    def cursor(self, consumer: str) -> Cursor:
        """Return the cursor of a consumer that takes.

        Raises:
            InvalidRequestError: there is no such consumer, or it is keyed.
        """
        if consumer not in self._bits:
            raise InvalidRequestError(
                f"table {self.spec.name!r}: consumer must be one of {list(self._bits)}, got {consumer!r}"
            )
        if consumer not in self.cursors:
            raise InvalidRequestError(
                f"table {self.spec.name!r}: consumer must have a queue, got the keyed {consumer!r}; "
                "use read and ack with uids"
            )
        return self.cursors[consumer]

    def num_unfinished(self, consumer: str) -> int:
        """Return how many rows a consumer has still to finish; looks at all rows if it is keyed."""
        if consumer in self.cursors:
            cursor = self.cursors[consumer]
            return cursor.unready.total() + cursor.num_ready() + cursor.num_leased()
        return sum(bool(row.pending & self._bits[consumer]) for row in self.rows.values())

    def no_more_coming(self, cursor: Cursor) -> bool:
        """Return whether nothing but redelivery can add to what is ready now."""
        stranded = self.groups.num_stranded if self.groups and cursor.by_group else 0
        return self.is_closed and cursor.unready.total() <= stranded

    def is_exhausted(self, cursor: Cursor) -> bool:
        """Return whether this consumer will never get another row."""
        return self.no_more_coming(cursor) and cursor.num_ready() == 0 and cursor.num_leased() == 0

    # ---- snapshots --------------------------------------------------------------------------------------------

    def capture(self) -> TableSnapshot:
        """Return all of the table but its definition as plain data."""
        retired_uids, retired_row_ids = self.capture_retired()
        return TableSnapshot(
            rows=self.capture_rows(),
            counts=dict(self.counts),
            num_truncated=self.num_truncated,
            arrived=self.groups.arrivals() if self.groups else {},
            retired_uids=retired_uids,
            retired_row_ids=retired_row_ids,
            ending=self.end.capture(),
            cursors={name: capture_cursor(cursor) for name, cursor in self.cursors.items()},
            letters=self.dead.capture(),
            given_up=list(self.dead_letters),
            plans=self.plans.capture(),
            last_step=dict(self.last_step),
            is_referred_to=self.unreferenced is not None,
            next_row_id=self.next_row_id,
        )

    def restore(self, snapshot: TableSnapshot) -> None:
        """Take back what `capture` returned into an empty table of the same definition."""
        self.restore_rows(snapshot)
        for name, cursor in self.cursors.items():
            if name in snapshot.cursors:
                restore_cursor(cursor, snapshot.cursors[name], self.rows)
        self.restore_letters(snapshot)
        leases = {name: lease for cursor in self.cursors.values() for name, lease in cursor.leases.items()}
        self.plans.restore(snapshot.plans, leases)
        self.last_step = dict(snapshot.last_step)

    # ---- putting ----------------------------------------------------------------------------------------------

    def put(
        self,
        uids: Sequence[str],
        group_ids: Sequence[str],
        parts: int,
        versions: Sequence[int] | None = None,
        labels: Mapping[str, Sequence[Any]] | None = None,
        *,
        now: float = 0.0,
    ) -> PutOutcome:
        """Add rows, or parts of rows that exist; what is there already is a duplicate and changes nothing.

        `versions` is policy_version_start a row, `labels` are values of `TableSpec.label_columns` that the parts hold.
        Call `room_needed` first: it holds the checks.
        """
        labels = labels or {}
        if self.are_new(uids):
            rows = self._add(uids, group_ids, parts, versions, labels, now)
            return PutOutcome([row.row_id for row in rows], [parts] * len(rows), rows)
        outcome = PutOutcome([-1] * len(uids), [parts] * len(uids), [])
        filled: list[Row] = []
        new: list[int] = []
        for index, found in enumerate(self.look_up(uids)):
            if found is None:
                new.append(index)
            elif isinstance(found, int):
                outcome.row_ids[index], outcome.new_parts[index] = found, 0
            else:
                added = parts & ~found.parts
                outcome.row_ids[index], outcome.new_parts[index] = found.row_id, added
                if added:
                    found.parts |= added
                    filled.append(found)
                    if labels:
                        self._label(found, added, labels, index)
        for cursor in self.cursors.values():
            cursor.advance([row for row in filled if row.pending & cursor.bit])
        outcome.arrived.extend(
            self._add(
                [uids[index] for index in new],
                [group_ids[index] for index in new],
                parts,
                None if versions is None else [versions[index] for index in new],
                {column: [values[index] for index in new] for column, values in labels.items()},
                now,
            )
        )
        for index, row in zip(new, outcome.arrived, strict=True):
            outcome.row_ids[index] = row.row_id
        self.counts["duplicates"] += outcome.num_duplicates
        return outcome

    def _add(
        self,
        uids: Sequence[str],
        group_ids: Sequence[str],
        parts: int,
        versions: Sequence[int] | None,
        labels: Mapping[str, Sequence[Any]],
        now: float,
    ) -> list[Row]:
        rows = self.add(
            uids,
            group_ids,
            repeat(0) if versions is None else versions,
            parts=parts,
            pending=sum(self._bits.values()),
            now=now,
        )
        for column, values in labels.items():
            for row, value in zip(rows, values, strict=True):
                row.labels[column] = value
        for cursor in self.cursors.values():
            cursor.arrive(rows)
        return rows

    def _label(self, row: Row, added: int, labels: Mapping[str, Sequence[Any]], index: int) -> None:
        for column, values in labels.items():
            if added & self.parts_of([column]):
                row.labels[column] = values[index]

    # ---- finishing --------------------------------------------------------------------------------------------

    def ack(self, consumer: str, lease_id: str | None, uids: Sequence[str] | None) -> int:
        """Finish rows for a consumer: a lease's rows, those of `uids` in it, or for a keyed consumer those of `uids`.

        Idempotent: a repeated ack of a whole lease returns the same number, a repeated keyed ack 0.

        Raises:
            LeaseLostError: the lease has expired.
            InvalidRequestError: the consumer is unknown, or the uids do not belong to the lease.
        """
        if lease_id is None and self._bits.get(consumer, 0) & self._keyed:
            return self._ack_keyed(consumer, uids)
        cursor = self.cursor(consumer)
        closed = cursor.closed(self._require_lease(lease_id))
        if closed is not None:
            return closed
        lease = cursor.find(self._require_lease(lease_id))
        return self._finish(cursor, lease, cursor.detach(lease, None if uids is None else set(uids)), "acked")

    def _require_lease(self, lease_id: str | None) -> str:
        if lease_id is None:
            raise InvalidRequestError(
                f"table {self.spec.name!r}: ack and nack must name the lease_id that take returned, got none; "
                "only keyed consumers ack by uids alone"
            )
        return lease_id

    def _ack_keyed(self, consumer: str, uids: Sequence[str] | None) -> int:
        if uids is None:
            raise InvalidRequestError(f"table {self.spec.name!r}: a keyed ack must name uids, got none")
        bit = self._bits[consumer]
        found = (self.find(uid) for uid in dict.fromkeys(uids))
        rows = [row for row in found if row is not None and row.pending & bit]
        self._settle(rows, bit)
        self.counts[f"acked:{consumer}"] += len(rows)
        return len(rows)

    def nack(
        self,
        consumer: str,
        lease_id: str | None,
        uids: Sequence[str] | None,
        *,
        reason: str,
        requeue: bool = True,
    ) -> int:
        """Give leased rows back, or with `requeue=False` skip them for good; a lost lease is no error twice.

        Raises:
            LeaseLostError: the lease has expired.
            InvalidRequestError: the consumer is unknown, or the uids do not belong to the lease.
        """
        cursor = self.cursor(consumer)
        closed = cursor.closed(self._require_lease(lease_id))
        if closed is not None:
            return closed
        lease = cursor.find(self._require_lease(lease_id))
        units = cursor.detach(lease, None if uids is None else set(uids))
        if requeue:
            self._give_back(cursor, lease, units, reason)
            return len(units) * cursor.unit_size
        self._note_dead(rows_of(units), consumer, reason)
        return self._finish(cursor, lease, units, "skipped")

    def is_due(self, now: float) -> bool:
        """Return whether a lease may have expired or a row may be too old: the quick look before `expire`."""
        for cursor in self.cursors.values():
            if cursor.is_due(now):
                return True
        return self.spec.max_age_s is not None

    def expire(self, now: float) -> int:
        """Give the rows of leases whose deadline has passed back to their consumers; return how many leases."""
        num_expired = 0
        for cursor in self.cursors.values():
            for lease in cursor.expired(now):
                num_expired += 1
                cursor.counts["expired_leases"] += 1
                self._give_back(
                    cursor, lease, list(lease.units.values()), f"lease of {lease.member!r} expired"
                )
        return num_expired

    def next_expiry(self) -> float | None:
        """Return when the next lease may expire, None if none is held."""
        times = [time for cursor in self.cursors.values() if (time := cursor.next_expiry()) is not None]
        return min(times, default=None)

    def _give_back(self, cursor: Cursor, lease: Lease, units: list[Unit], reason: str) -> None:
        again, dead = cursor.give_back(units, self.spec.max_attempts)
        self.plans.void(lease.lease_id)
        self.look_at_age_again()
        self.events.append(Event("returned", again, cursor.name, lease.version))
        if dead:
            self._note_dead(dead, cursor.name, f"tried {self.spec.max_attempts} times, at last: {reason}")
            lost = {id(row) for row in dead}
            given_up = [unit for unit in units if id(unit.rows[0]) in lost]
            self._bury(cursor.name, given_up, reason)
            self._finish(cursor, lease, given_up, "dead")
            self._discard_surplus()

    def _finish(self, cursor: Cursor, lease: Lease, units: list[Unit], kind: str) -> int:
        rows = rows_of(units)
        cursor.finish(units)
        if kind == "skipped":
            for row in rows:
                row.given_up = True
        cursor.counts[kind] += len(rows)
        self.plans.end(lease.lease_id, kind, is_whole=lease.lease_id not in cursor.leases)
        self.events.append(Event(kind, rows, cursor.name, lease.version, lease.max_staleness))
        self._settle(rows, cursor.bit)
        return len(rows)
