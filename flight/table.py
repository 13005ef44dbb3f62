"""One table: the life of its rows from put to retirement, as a pure state machine.

It knows no sockets, locks, threads, clocks or data: time is an argument, values live in `flight.store`, waiting in
`flight.broker`, and what one table means for another (tickets, staleness) in `flight.ledger`.

    put --> a row exists; each writer delivers one *part* of it (the columns of that writer)
        --> ready for a consumer once the parts with its columns are there (and its group is whole)
        --> leased to a member until a deadline, then
              ack                      finished for this consumer
              nack(requeue), expiry    ready again; after max_attempts deliveries: dead
              nack(requeue=False)      skipped
        --> retired once every consumer is finished with it: its memory is freed, its uid is remembered for a while

Room is counted so that a table cannot lock itself: an incomplete group holds room for all its rows, so the rest of a
group always fits, and a part of a row that exists needs no room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from flight.cursor import Cursor, Lease, Row, Unit
from flight.errors import CapacityError, InvalidRequestError, TableSealedError
from flight.groups import GroupBook
from flight.schema import KEY_COLUMNS, ConsumerSpec, TableSpec

RETIRED_UIDS_KEPT = 100_000
"""Uids of retired rows remembered a table; a put repeated later than that makes a new row."""

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


class TableState:
    """Rows, groups and cursors of one table. Not thread-safe."""

    def __init__(self, spec: TableSpec, *, lease_prefix: str = "") -> None:
        self.spec = spec
        self.rows: dict[int, Row] = {}
        self.cursors: dict[str, Cursor] = {}
        self.counts: Counter[str] = Counter()
        self.last_step: dict[str, int] = {}
        """The optimizer step of each consumer's last ack that named one."""
        self.dead_letters: list[tuple[str, str, str]] = []
        """(uid, consumer, reason) of the last rows given up."""
        self.events: list[Event] = []
        """What befell rows since the owner last cleared this list."""
        self.retired: list[int] = []
        """Rows retired since the owner last cleared this list."""
        self.dropped: list[Row] = []
        """Rows dropped for their age since the owner last cleared this list."""
        self.part_names = list(dict.fromkeys(column.writer for column in spec.columns)) or [""]
        self._bits = {consumer.name: 1 << index for index, consumer in enumerate(spec.consumers)}
        self._keyed = 0
        self._by_uid: dict[str, Row] = {}
        self._retired_uids: dict[str, int] = {}
        self._sealed = False
        self._expected_rows: int | None = None
        by_group = any(consumer.sampler == "groups" for consumer in spec.consumers)
        self.groups = GroupBook(spec.group_size) if by_group else None
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

    def parts_of(self, columns: Sequence[str]) -> int:
        """Return the bit set of the parts that hold `columns`; key columns are in every part."""
        parts = 0
        for name in columns:
            if name not in KEY_COLUMNS:
                parts |= 1 << self.part_names.index(self.spec.columns_by_name[name].writer)
        return parts

    def find(self, uid: str) -> Row | None:
        """Return the row of that uid if it is in the table."""
        return self._by_uid.get(uid)

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

    def some_rows(self, max_rows: int | None, *, newest: bool) -> list[Row]:
        """Return the oldest (or newest) rows of the table, at most `max_rows`, oldest first."""
        if newest:
            return list(islice(reversed(self.rows.values()), max_rows))[::-1]
        return list(islice(self.rows.values(), max_rows))

    def num_new(self, uids: Sequence[str]) -> int:
        """Return how many of these uids are neither in the table nor remembered as retired."""
        return sum(uid not in self._by_uid and uid not in self._retired_uids for uid in uids)

    def num_unfinished(self, consumer: str) -> int:
        """Return how many rows a consumer has still to finish; looks at all rows if it is keyed."""
        if consumer in self.cursors:
            cursor = self.cursors[consumer]
            return cursor.unready.total() + cursor.num_ready() + cursor.num_leased()
        return sum(bool(row.pending & self._bits[consumer]) for row in self.rows.values())

    @property
    def is_closed(self) -> bool:
        """Return whether no new row can come."""
        return self._sealed and (self._expected_rows is None or self.num_put >= self._expected_rows)

    @property
    def num_put(self) -> int:
        """Return how many rows have come, without those that were retracted to come again."""
        return self.counts["put"] - self.counts["retracted"]

    @property
    def num_reserved(self) -> int:
        """Return the rows that the table holds or keeps room for."""
        return len(self.rows) + (self.groups.num_open if self.groups else 0)

    def no_more_coming(self, cursor: Cursor) -> bool:
        """Return whether nothing but redelivery can add to what is ready now."""
        stranded = self.groups.num_stranded if self.groups and cursor.by_group else 0
        return self.is_closed and cursor.unready.total() <= stranded

    def is_exhausted(self, cursor: Cursor) -> bool:
        """Return whether this consumer will never get another row."""
        return self.no_more_coming(cursor) and cursor.num_ready() == 0 and cursor.num_leased() == 0

    # ---- putting ----------------------------------------------------------------------------------------------

    def room_needed(self, uids: Sequence[str], group_ids: Sequence[str]) -> int:
        """Return the rows of room that a put needs beyond what is reserved; the put fits if this is at most `room`.

        Raises:
            InvalidRequestError: a uid is empty or twice in the put, or a group would get too many rows.
            TableSealedError: there are new rows after the end.
            CapacityError: the put can never fit.
        """
        where = f"put into {self.spec.name}"
        if len(set(uids)) != len(uids):
            twice = next(uid for uid, num in Counter(uids).items() if num > 1)
            raise InvalidRequestError(f"{where}: uid must be unique inside a batch, got {twice!r} twice")
        new_groups: Counter[str] = Counter()
        for uid, group_id in zip(uids, group_ids, strict=True):
            if uid not in self._by_uid and uid not in self._retired_uids:
                new_groups[group_id] += 1
        self._check_not_sealed(where, new_groups.total())
        needed = self.groups.room_needed(where, new_groups) if self.groups else new_groups.total()
        if needed > self.spec.capacity_rows:
            raise CapacityError(
                f"{where}: one batch must need at most capacity_rows {self.spec.capacity_rows} rows, got {needed}; "
                "cut the batch or raise the capacity"
            )
        return needed

    @property
    def room(self) -> int:
        """Return the rows of room that are neither used nor reserved."""
        return self.spec.capacity_rows - self.num_reserved

    def _check_not_sealed(self, where: str, num_new: int) -> None:
        if num_new and self._sealed:
            if self._expected_rows is None:
                raise TableSealedError(f"{where}: new rows must come before the seal, got {num_new} after it")
            if self.num_put + num_new > self._expected_rows:
                raise TableSealedError(
                    f"{where}: rows must be at most the expected {self._expected_rows}, "
                    f"got {num_new} more than the {self.num_put} that came"
                )

    def put(
        self, uids: Sequence[str], group_ids: Sequence[str], parts: int, versions: Sequence[int] | None = None
    ) -> PutOutcome:
        """Add rows, or parts of rows that exist; what is there already is a duplicate and changes nothing.

        `versions` is policy_version_start a row. Call `room_needed` first: it holds the checks.
        """
        outcome = PutOutcome([], [], [])
        for index, uid in enumerate(uids):
            row = self._by_uid.get(uid)
            if row is not None:
                outcome.row_ids.append(row.row_id)
                outcome.new_parts.append(self._fill(row, parts))
            elif uid in self._retired_uids:
                outcome.row_ids.append(self._retired_uids[uid])
                outcome.new_parts.append(0)
            else:
                row = self._add(uid, group_ids[index], parts, versions[index] if versions is not None else 0)
                outcome.row_ids.append(row.row_id)
                outcome.new_parts.append(parts)
                outcome.arrived.append(row)
        self.counts["duplicates"] += outcome.num_duplicates
        return outcome

    def _add(self, uid: str, group_id: str, parts: int, version: int) -> Row:
        row = Row(self.counts["put"], uid, group_id, version, parts, pending=sum(self._bits.values()))
        self.counts["put"] += 1
        self.rows[row.row_id] = row
        self._by_uid[uid] = row
        if self.groups:
            self.groups.join(row)
        for cursor in self.cursors.values():
            cursor.arrive(row)
        return row

    def _fill(self, row: Row, parts: int) -> int:
        new_parts = parts & ~row.parts
        if new_parts:
            row.parts |= new_parts
            for cursor in self.cursors.values():
                if row.pending & cursor.bit:
                    cursor.advance(row)
        return new_parts

    def seal(self, expected_rows: int | None = None) -> None:
        """Declare the end: no new rows, or none beyond `expected_rows` in all. Idempotent.

        Raises:
            InvalidRequestError: more rows than that are there already.
        """
        num_put = self.num_put
        if expected_rows is not None and expected_rows < num_put:
            raise InvalidRequestError(
                f"seal {self.spec.name}: expected_rows must be at least the {num_put} rows put so far, "
                f"got {expected_rows}"
            )
        if not self.is_closed:
            self._sealed = True
            self._expected_rows = expected_rows

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
        rows = [self._by_uid[uid] for uid in dict.fromkeys(uids) if uid in self._by_uid]
        rows = [row for row in rows if row.pending & bit]
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
                self._retire(row)

    def release(self, uid: str) -> None:
        """Let a row go that its keyed consumers will not ask for any more. Idempotent, harmless if it is gone."""
        row = self._by_uid.get(uid)
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
            self._retire(row)
            if kind == "retracted":
                del self._retired_uids[row.uid]
            elif kind == "dropped":
                self.dropped.append(row)

    def _retire(self, row: Row) -> None:
        del self.rows[row.row_id]
        del self._by_uid[row.uid]
        self._retired_uids[row.uid] = row.row_id
        if len(self._retired_uids) > RETIRED_UIDS_KEPT:
            del self._retired_uids[next(iter(self._retired_uids))]
        self.retired.append(row.row_id)
        self.counts["retired"] += 1
        if self.groups:
            self.groups.leave(row)

    def _note_dead(self, rows: Sequence[Row], consumer: str, reason: str) -> None:
        self.dead_letters += [(row.uid, consumer, reason) for row in rows]
        del self.dead_letters[:-DEAD_LETTERS_KEPT]
