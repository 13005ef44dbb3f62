"""One table: the life of its rows from put to retirement, as a pure state machine.

It knows no sockets, locks, threads, clocks or data: time is an argument, values live in `flight.store`, waiting in
`flight.broker`, what one table means for another (tickets, staleness) in `flight.ledger`. Which rows there are is kept
in `flight.rows`, each consumer's queue and leases in `flight.cursor`.

    put --> a row exists; each writer delivers one *part* of it (the columns of that writer)
        --> ready for a consumer once the parts with its columns are there (and its group is whole)
        --> leased to a member until a deadline, then
              ack                      finished for this consumer
              nack(requeue), expiry    ready again; after max_attempts deliveries: dead
              nack(requeue=False)      skipped
        --> retired once every consumer is finished with it: its memory is freed, its uid is remembered for a while
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flight.cursor import Cursor, Lease, Row, Unit
from flight.errors import InvalidRequestError
from flight.rows import RowBook
from flight.schema import ConsumerSpec, TableSpec

DEAD_LETTERS_KEPT = 1000
"""Rows given up that the statistics can name."""


class Event(NamedTuple):
    """What befell a row at one consumer.

    kind: "acked", "returned" (nack or expiry, ready again), "skipped" (nack without requeue), "dead" (tried too often),
        "dropped" (too old to train on), "abandoned" (its group will never be whole) or "retracted" (its group will be
        made anew).
    version: the policy version that the row was taken for; 0 if it was not.
    """

    kind: str
    row: Row
    consumer: str
    version: int


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """row_ids and, a row, the bit set of the parts that this put added (0 for a duplicate)."""

    row_ids: list[int]
    new_parts: list[int]
    arrived: list[Row]

    @property
    def num_duplicates(self) -> int:
        """Return how many rows of the put changed nothing."""
        return sum(parts == 0 for parts in self.new_parts)


class TableState(RowBook):
    """The rows of one table and the consumers' cursors over them. Not thread-safe."""

    def __init__(self, spec: TableSpec, *, lease_prefix: str = "") -> None:
        super().__init__(spec)
        self.cursors: dict[str, Cursor] = {}
        self.last_step: dict[str, int] = {}
        """The optimizer step of each consumer's last ack that named one."""
        self.dead_letters: list[tuple[str, str, str]] = []
        """(uid, consumer, reason) of the last rows given up."""
        self.events: list[Event] = []
        """What befell rows since the owner last cleared this list."""
        self.dropped: list[Row] = []
        """Rows dropped for their age since the owner last cleared this list."""
        self._bits = {consumer.name: 1 << index for index, consumer in enumerate(spec.consumers)}
        self._keyed = 0
        for consumer in spec.consumers:
            self._add_consumer(consumer, lease_prefix)

    def _add_consumer(self, consumer: ConsumerSpec, lease_prefix: str) -> None:
        bit = self._bits[consumer.name]
        if consumer.sampler == "keyed":
            self._keyed |= bit
            return
        self.cursors[consumer.name] = Cursor(
            consumer,
            self.spec,
            bit=bit,
            needs=self.parts_of(consumer.columns),
            lease_prefix=f"{lease_prefix}{self.spec.name}-",
        )

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

    # ---- putting ----------------------------------------------------------------------------------------------

    def put(
        self, uids: Sequence[str], group_ids: Sequence[str], parts: int, versions: Sequence[int] | None = None
    ) -> PutOutcome:
        """Add rows, or parts of rows that exist; what is there already is a duplicate and changes nothing.

        `versions` is policy_version_start a row. Call `room_needed` first: it holds the checks.
        """
        outcome = PutOutcome([], [], [])
        everyone = sum(self._bits.values())
        for index, uid in enumerate(uids):
            row = self.find(uid)
            retired_id = None if row is not None else self.find_retired(uid)
            if row is not None:
                outcome.row_ids.append(row.row_id)
                outcome.new_parts.append(self._fill(row, parts))
            elif retired_id is not None:
                outcome.row_ids.append(retired_id)
                outcome.new_parts.append(0)
            else:
                row = self.add(
                    uid, group_ids[index], parts, versions[index] if versions is not None else 0, everyone
                )
                for cursor in self.cursors.values():
                    cursor.arrive(row)
                outcome.row_ids.append(row.row_id)
                outcome.new_parts.append(parts)
                outcome.arrived.append(row)
        self.counts["duplicates"] += outcome.num_duplicates
        return outcome

    def _fill(self, row: Row, parts: int) -> int:
        new_parts = parts & ~row.parts
        if new_parts:
            row.parts |= new_parts
            for cursor in self.cursors.values():
                if row.pending & cursor.bit:
                    cursor.advance(row)
        return new_parts

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
        self._note_dead([row for unit in units for row in unit.rows], consumer, reason)
        return self._finish(cursor, lease, units, "skipped")

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
        self.events += [Event("returned", row, cursor.name, lease.version) for row in again]
        if dead:
            self._note_dead(dead, cursor.name, f"tried {self.spec.max_attempts} times, at last: {reason}")
            lost = {id(row) for row in dead}
            self._finish(cursor, lease, [unit for unit in units if id(unit.rows[0]) in lost], "dead")

    def _finish(self, cursor: Cursor, lease: Lease, units: list[Unit], kind: str) -> int:
        rows = [row for unit in units for row in unit.rows]
        for unit in units:
            cursor.finish(unit)
        for row in rows:
            row.given_up |= kind != "acked"
        cursor.counts[kind] += len(rows)
        self.events += [Event(kind, row, cursor.name, lease.version) for row in rows]
        self._settle(rows, cursor.bit)
        return len(rows)

    def _settle(self, rows: Sequence[Row], bit: int) -> None:
        """Clear a consumer's bit and retire what nobody waits for; keyed consumers do not hold what was given up."""
        for row in rows:
            row.pending &= ~bit
            if row.given_up:
                row.pending &= ~self._keyed
            if not row.pending:
                self.retire(row)

    def release(self, uid: str) -> None:
        """Let a row go that its keyed consumers will not ask for any more. Idempotent, harmless if it is gone."""
        row = self.find(uid)
        if row is not None:
            row.given_up = True
            self._settle([row], 0)

    def remove(self, rows: Sequence[Row], consumer: str, kind: str) -> None:
        """Retire rows for all consumers whatever their state; `kind` is "dropped", "abandoned" or "retracted".

        A retracted row's uid is forgotten and does not count as put, so that its group can be made anew.
        """
        for row in list(rows):
            if row.pending & self._bits.get(consumer, 0):
                self.events.append(Event(kind, row, consumer, 0))
            for cursor in self.cursors.values():
                if row.pending & cursor.bit:
                    cursor.forget(row)
            self.counts[kind] += 1
            self.retire(row, forget_uid=kind == "retracted")
            if kind == "dropped":
                self.dropped.append(row)

    def _note_dead(self, rows: Sequence[Row], consumer: str, reason: str) -> None:
        self.dead_letters += [(row.uid, consumer, reason) for row in rows]
        del self.dead_letters[:-DEAD_LETTERS_KEPT]
