"""How long a table keeps its rows: until all consumers have finished them, or for as long as its limits say. Pure.

Consumers put, take and finish in `flight.table`; here rows leave: retired, removed, expired by age, truncated, or kept
as dead letters (`flight.state.deadletters`) until they are requeued or must make room.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from flight.errors import InvalidRequestError
from flight.schema import ConsumerSpec, TableSpec
from flight.state.cursor import Cursor
from flight.state.deadletters import DeadLetter, DeadLetters
from flight.state.leases import Row, Unit
from flight.state.plan_book import PlanBook
from flight.state.rows import REFERENCED, RowBook
from flight.state.snapshots import TableSnapshot

DEAD_LETTERS_KEPT = 1000
"""Rows given up that the statistics can name."""


class Event(NamedTuple):
    """What befell rows at one consumer, all at once.

    kind: "acked", "returned" (nack or expiry, ready again), "skipped" (nack without requeue), "dead" (tried too often),
        "requeued" (ready again after it was dead), "dropped" (too old to train on), "expired" (too long in the table),
        "truncated", "abandoned" (its group will never be whole), "retracted" (its group will be made anew), "uniform"
        (its whole group has one value in the column `skip_equal`) or "lost" (its values are gone).
    version: the policy version that the rows were taken for; 0 if they were not.
    max_staleness: the bound that held when they were taken; None if there is none or they were not.
    """

    kind: str
    rows: Sequence[Row]
    consumer: str
    version: int
    max_staleness: int | None = None


class TableKeeping(RowBook):
    """Rows, the consumers that still need each, and what makes rows go. Not thread-safe."""

    def __init__(self, spec: TableSpec, *, lease_prefix: str = "") -> None:
        super().__init__(spec)
        self.cursors: dict[str, Cursor] = {}
        self.dead = DeadLetters(spec.max_dead_letters)
        self.dead_letters: list[tuple[str, str, str]] = []
        """(uid, consumer, reason) of the last rows given up, those that are gone included."""
        self.events: list[Event] = []
        """What befell rows since the owner last cleared this list."""
        self.measured: list[tuple[str, Row]] = []
        """("trained", "stale" or "dropped", row) whose length is wanted since the owner last cleared this list."""
        self.plans = PlanBook()
        self.former_specs: list[TableSpec] = []
        """What the table was before it was altered."""
        self._bits: dict[str, int] = {}
        self._keyed = 0
        self._lease_prefix = f"{lease_prefix}{spec.name}-"
        self._next_age_check: float | None = None
        for consumer in spec.consumers:
            self._add_consumer(consumer, self._make_cursor(consumer))

    # ---- consumers --------------------------------------------------------------------------------------------

    def alter(self, spec: TableSpec) -> None:
        """Take over a specification that `flight.state.evolution` made: columns and consumers are added to what is
        there.

        A new consumer starts at the oldest row that is still there; one of groups leaves out those that are torn.

        Raises:
            InvalidRequestError: a consumer of groups comes to a table whose groups were not kept.
        """
        former, new = self.spec, spec.consumers[len(self.spec.consumers) :]
        part_names = [column.writer for column in spec.columns]
        before = self.part_names
        self.spec, self.part_names = spec, list(dict.fromkeys([*self.part_names, *part_names]))
        added = [(consumer, self._make_cursor(consumer)) for consumer in new]
        if any(cursor is not None and cursor.by_group for _, cursor in added) and self.groups is None:
            self.spec, self.part_names = former, before
            raise InvalidRequestError(
                f"alter {spec.name}: consumers of groups must be there when the table is created, or another one like "
                f"them, got {[consumer.name for consumer in new]}; create a table with them"
            )
        self.former_specs.append(former)
        for consumer, cursor in added:
            self._add_consumer(consumer, cursor)
            wanted = [
                row
                for row in self.rows.values()
                if cursor is None or not (cursor.by_group and self._is_torn(row))
            ]
            for row in wanted:
                row.pending |= self._bits[consumer.name]
                self.buried.pop(row.row_id, None)
            if cursor is not None:
                cursor.arrive(wanted)

    def _make_cursor(self, consumer: ConsumerSpec) -> Cursor | None:
        """Return the queue of a consumer, None for a keyed one."""
        if consumer.sampler == "keyed":
            return None
        bit = 1 << [each.name for each in self.spec.consumers].index(consumer.name)
        needs = self.parts_of(consumer.columns)
        return Cursor(consumer, self.spec, bit=bit, needs=needs, lease_prefix=self._lease_prefix)

    def _add_consumer(self, consumer: ConsumerSpec, cursor: Cursor | None) -> None:
        self._bits[consumer.name] = 1 << len(self._bits)
        if cursor is None:
            self._keyed |= self._bits[consumer.name]
        else:
            self.cursors[consumer.name] = cursor

    def _is_torn(self, row: Row) -> bool:
        return self.groups is not None and self.groups.is_torn(row.group_id)

    # ---- retiring ---------------------------------------------------------------------------------------------

    def _settle(self, rows: Sequence[Row], bit: int) -> None:
        """Clear a consumer's bit and retire what nobody waits for; keyed consumers do not hold what was given up."""
        others, keyed = ~bit, self._keyed
        finished = []
        for row in rows:
            row.pending &= others
            if row.given_up and not row.dead:
                row.pending &= ~keyed
            if row.dead and not row.pending & ~keyed:
                self.buried[row.row_id] = row
            elif not row.pending:
                finished.append(row)
        self.retire(finished)

    def release(self, uid: str) -> None:
        """Let a row go that its keyed consumers will not ask for any more. Idempotent, harmless if it is gone."""
        row = self.find(uid)
        if row is not None:
            row.given_up = True
            self._settle([row], 0)

    def remove(self, rows: Sequence[Row], kind: str) -> None:
        """Retire rows for all consumers whatever their state; `kind` is that of the events, see `Event`.

        The uid of a retracted, truncated or lost row is forgotten, so that it can be made anew.
        """
        for row in list(rows):
            if row.row_id not in self.rows:
                continue
            for letter in self.dead.holding(row):
                self._discard(letter, but=row)
            for cursor in self.cursors.values():
                if row.pending & cursor.bit:
                    self.events.append(Event(kind, (row,), cursor.name, 0))
                    self.plans.void(cursor.forget(row))
            self.counts[kind] += 1
            self.retire([row], forget_uid=kind in ("retracted", "truncated", "lost"))
            if kind == "dropped":
                self.measured.append((kind, row))

    def lose(self, rows: Sequence[Row]) -> list[Row]:
        """Remove rows whose values are gone, and the rest of their groups; return all that left.

        They are not expected any more, but may be put anew.
        """
        lost: list[Row] = []
        for row in rows:
            family = self.groups.rows_of(row.group_id) if self.groups else [row]
            there = [each for each in family if each.row_id in self.rows]
            self.remove(there, "lost")
            self.end.miss(row.group_id, len(there))
            lost += there
        return lost

    def truncate(self) -> int:
        """Remove all rows; the table begins anew, but row numbers go on. Returns how many rows there were."""
        num_rows = len(self.rows)
        live = {name: list(cursor.leases) for name, cursor in self.cursors.items()}
        self.remove(list(self.rows.values()), "truncated")
        for name, lease_ids in live.items():
            self.cursors[name].void(lease_ids)
        self.begin_anew()
        return num_rows

    # ---- references -------------------------------------------------------------------------------------------

    def hold_for_references(self) -> None:
        """Keep rows, those that are there too, until nothing refers to them any more; see `flight.state.references`."""
        if self.unreferenced is None:
            self.unreferenced = dict(self.rows)
            self.buried.clear()
            self.forget_retired()
            for row in self.rows.values():
                row.pending |= REFERENCED

    def hold(self, uid: str) -> None:
        """Note the first reference to a row."""
        row = self.find(uid)
        if row is not None and self.unreferenced is not None:
            row.pending |= REFERENCED
            self.buried.pop(row.row_id, None)
            self.unreferenced.pop(row.row_id, None)

    def let_go(self, uids: Sequence[str]) -> None:
        """Note that nothing refers to these rows any more; each goes once its consumers have finished it."""
        rows = [row for row in map(self.find, uids) if row is not None]
        self.counts["unreferenced"] += len(rows)
        self._settle(rows, REFERENCED)

    # ---- dead letters -----------------------------------------------------------------------------------------

    def _bury(self, consumer: str, units: Sequence[Unit], reason: str) -> None:
        """Keep units as dead letters of a consumer; the oldest ones go if they are too many."""
        for unit in units:
            self.dead.add(consumer, unit, reason)
            for row in unit.rows:
                row.dead |= self._bits[consumer]

    def _discard_surplus(self) -> None:
        while (letter := self.dead.surplus()) is not None:
            self._discard(letter)

    def discard_oldest_dead(self) -> bool:
        """Let the oldest dead letter go whose rows nobody else needs; return whether there was one."""
        letter = self.dead.oldest_buried(self.buried)
        if letter is not None:
            self._discard(letter)
        return letter is not None

    def _discard(self, letter: DeadLetter, but: Row | None = None) -> None:
        self.dead.remove(letter)
        self.counts["dead_discarded"] += len(letter.rows)
        for row in letter.rows:
            row.dead &= ~self._bits[letter.consumer]
            if row is not but and not row.dead:
                row.given_up = True
                self.buried.pop(row.row_id, None)
                self._settle([row], 0)

    def requeue(self, consumer: str, uids: Collection[str] | None) -> int:
        """Make dead letters of a consumer ready again, all or those with a row of `uids`; return how many rows.

        Groups come back whole, attempts are counted from the start. Idempotent.

        Raises:
            InvalidRequestError: there is no such consumer.
        """
        if consumer not in self._bits:
            raise InvalidRequestError(
                f"requeue {self.spec.name}: consumer must be one of {list(self._bits)}, got {consumer!r}"
            )
        num_rows = 0
        bit = self._bits[consumer]
        for letter in self.dead.of(consumer, uids):
            self.dead.remove(letter)
            for row in letter.rows:
                row.dead &= ~bit
                row.pending |= bit
                self.buried.pop(row.row_id, None)
            self.events.append(Event("requeued", letter.rows, consumer, 0))
            self.cursors[consumer].revive(letter.rows)
            num_rows += len(letter.rows)
        if num_rows:
            self.cursors[consumer].counts["requeued"] += num_rows
        return num_rows

    def _note_dead(self, rows: Sequence[Row], consumer: str, reason: str) -> None:
        self.dead_letters += [(row.uid, consumer, reason) for row in rows]
        del self.dead_letters[:-DEAD_LETTERS_KEPT]

    def restore_letters(self, snapshot: TableSnapshot) -> None:
        """Take back the dead letters; the rows are there."""
        for letter in snapshot.letters:
            rows = tuple(self.rows[row_id] for row_id in letter.row_ids)
            self.dead.add(letter.consumer, Unit(rows, 0, attempts=letter.attempts), letter.reason)
        self.buried = {
            row.row_id: row for row in self.rows.values() if row.dead and not row.pending & ~self._keyed
        }
        self.dead_letters = list(snapshot.given_up)

    # ---- age --------------------------------------------------------------------------------------------------

    def next_age_check(self) -> float | None:
        """Return when the next row may have been here too long, None if none can."""
        age_s, ageing = self.spec.max_age_s, self._ageing()
        if age_s is None or not ageing:
            return None
        if self._next_age_check is None:
            self._next_age_check = next(iter(ageing.values())).put_at + age_s
        return self._next_age_check

    def _ageing(self) -> dict[int, Row]:
        """Return the rows that may grow too old, oldest first."""
        return self.rows if self.unreferenced is None else self.unreferenced

    def expire_old(self, now: float) -> int:
        """Remove rows that are older than `max_age_s`, groups by their oldest row; those on lease may finish first."""
        due = self.next_age_check()
        if due is None or now < due:
            return 0
        age_s = self.spec.max_age_s or 0.0
        num_before = len(self.rows)
        checks: list[float] = []
        old = []
        for row in self._ageing().values():
            if row.put_at + age_s > now:
                checks.append(row.put_at + age_s)
                break
            old.append(row)
        for row in old:
            family = self.groups.rows_of(row.group_id) if self.groups else [row]
            ends = [
                end for each in family for cursor in self.cursors.values() if (end := cursor.held_until(each))
            ]
            if ends:
                checks.append(max(min(ends), now))
            else:
                self.remove(family, "expired")
        self._next_age_check = min(checks, default=None)
        return num_before - len(self.rows)

    def shift_times(self, seconds: float) -> None:
        """Take over another clock: the times at which rows were put are `seconds` later on it."""
        for row in self.rows.values():
            row.put_at += seconds
        self._next_age_check = None

    def renew_grace(self, now: float) -> None:
        """Let rows that nothing has referred to yet begin to wait for that anew: those who would may be late."""
        for row in (self.unreferenced or {}).values():
            row.put_at = now
        self._next_age_check = None

    def look_at_age_again(self) -> None:
        """Note that rows came back from a lease; they may be too old by now."""
        self._next_age_check = None
