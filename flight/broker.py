"""The tables of one server behind one lock: what waits, waits here. It knows no sockets and no Flight.

`flight.ledger` decides, `flight.store` holds the values, this module adds the lock, the clock and the waiting. Data are
copied in before the lock is taken and gathered after it is released; under it there is index arithmetic only. A wait
ends when the table (or one tied to it by tickets) changes, a lease expires, the deadline passes or the caller is gone.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from flight.batches import CheckedBatch, check_batch, check_schema
from flight.cursor import Row
from flight.errors import (
    CapacityError,
    DeadlineExceededError,
    OverloadedError,
    SchemaMismatchError,
    UnavailableError,
)
from flight.ledger import Ledger, TakeRequest, TakeStatus
from flight.projection import Places, project
from flight.schema import TableSpec
from flight.statistics import table_statistics
from flight.store import ColumnStore, lengths, retain
from flight.table import PutOutcome, TableState

CHECK_CALLER_S = 1.0
"""How often a waiting call looks whether its caller is still there."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """How long a call may wait. `deadline` is on the broker's clock; `is_gone` tells that nobody wants the answer."""

    deadline: float
    is_gone: Callable[[], bool] = lambda: False


@dataclass(frozen=True, kw_only=True)
class TakeAnswer:
    """`table` holds row_id, uid, group_id, attempt and the columns asked for; no rows unless status is "rows"."""

    status: TakeStatus
    policy_version: int
    lease_id: str
    table: pa.Table


@dataclass(frozen=True, kw_only=True)
class ReadRequest:
    """Rows to look at: all, those of `uids` that are there, or the first (`newest`: last) `max_rows`."""

    columns: Sequence[str] | None = None
    uids: Sequence[str] | None = None
    max_rows: int | None = None
    newest: bool = False


class Broker:
    """Thread-safe tables. All methods are short unless they take a `Wait`."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, lease_prefix: str = "", max_waiting: int = 1024
    ) -> None:
        self.clock = clock
        self._ledger = Ledger(lease_prefix=lease_prefix)
        self._stores: dict[str, ColumnStore] = {}
        self._lock = threading.RLock()
        self._changed: dict[str, threading.Condition] = {}
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._is_closing = False

    # ---- tables -----------------------------------------------------------------------------------------------

    def create_table(self, spec: TableSpec, *, exist_ok: bool) -> None:
        """Add a table; see `Ledger.create`."""
        with self._locked():
            if self._ledger.create(spec, exist_ok=exist_ok):
                self._stores[spec.name] = ColumnStore(len(self._ledger.table(spec.name).part_names))
                self._changed[spec.name] = threading.Condition(self._lock)

    def drop_table(self, name: str) -> None:
        """Remove a table; calls that wait on it are answered with TableNotFoundError."""
        with self._locked():
            related = [each for each in self._related(name) if each != name]
            self._ledger.drop(name)
            del self._stores[name]
            self._changed.pop(name).notify_all()
            self._notify(related)

    def list_tables(self) -> list[str]:
        """Return the names of the tables."""
        with self._locked():
            return sorted(self._ledger.tables)

    def describe(self, name: str) -> TableSpec:
        """Return a table's specification."""
        with self._locked():
            return self._ledger.table(name).spec

    def size(self, name: str) -> tuple[int, int]:
        """Return rows and bytes of a table."""
        with self._locked():
            return len(self._ledger.table(name).rows), self._stores[name].nbytes

    def stats(self, name: str | None = None) -> dict[str, Any]:
        """Return statistics by table name."""
        with self._locked():
            tables = self._ledger.tables if name is None else {name: self._ledger.table(name)}
            return {
                each: table_statistics(table, self._ledger.gates.get(each), self._stores[each].nbytes)
                for each, table in tables.items()
            }

    # ---- putting ----------------------------------------------------------------------------------------------

    def put(self, name: str, batch: pa.RecordBatch, writer: str, wait: Wait) -> PutOutcome:
        """Add the rows of one batch, all or none; waits for room.

        Raises:
            SchemaMismatchError: the batch does not fit the table.
            DeadlineExceededError: no room came; the message says which consumer is behind.
            CapacityError: the batch alone is larger than the table may be.
            TableSealedError: there are new rows after the end.
        """
        spec = self.describe(name)
        checked = check_batch(spec, batch, check_schema(spec, batch.schema, writer))
        parts = {part: retain(data) for part, data in checked.split(spec).items()}
        with self._locked():
            table = self._wait_for_room(name, checked, sum(part.nbytes for part in parts.values()), wait)
            bits = {part: table.part_names.index(part) for part in parts} or {"": 0}
            mask = sum(1 << bit for bit in bits.values())
            outcome = self._ledger.put(name, checked.uids, checked.group_ids, mask, checked.versions)
            for part, data in parts.items():
                bit = 1 << bits[part]
                new = zip(outcome.row_ids, outcome.new_parts, strict=True)
                self._stores[name].add(
                    bits[part], data, [row_id if added & bit else -1 for row_id, added in new]
                )
            self._after(name)
            return outcome

    def _wait_for_room(self, name: str, checked: CheckedBatch, num_bytes: int, wait: Wait) -> TableState:
        """Wait until the new rows fit. The rest of an open group and parts of rows that exist always fit."""
        while True:
            table = self._ledger.table(name)
            capacity_bytes = table.spec.capacity_bytes
            needed = table.room_needed(checked.uids, checked.group_ids)
            if checked.versions is None and table.spec.staleness is not None and table.num_new(checked.uids):
                raise SchemaMismatchError(
                    f"put into {name}: the first part of a row must have policy_version_start, got columns "
                    f"{checked.data.schema.names} for a uid that is not in the table"
                )
            if needed and num_bytes > capacity_bytes:
                raise CapacityError(
                    f"put into {name}: one batch must be at most capacity_bytes {capacity_bytes}, got {num_bytes}; "
                    "cut the batch or raise the capacity"
                )
            fits = needed <= table.room and self._stores[name].nbytes + num_bytes <= capacity_bytes
            if not needed or fits:
                return table
            if not self._wait(name, wait):
                free_bytes = capacity_bytes - self._stores[name].nbytes
                raise DeadlineExceededError(_no_room(table, needed, num_bytes, free_bytes))

    # ---- taking -----------------------------------------------------------------------------------------------

    def take(self, name: str, request: TakeRequest, columns: Sequence[str] | None, wait: Wait) -> TakeAnswer:
        """Lease rows; waits until there are at least `min_rows`, the end is reached, or the deadline passes."""
        with self._locked():
            chosen = self._ledger.table(name).spec.columns_for(request.consumer, columns)
            while (taken := self._ledger.take(name, request, self.clock())) is None:
                self._after(name, has_changed=False)
                if not self._wait(name, wait):
                    break
            self._after(name)
            status: TakeStatus = "empty" if taken is None else taken.status
            lease = taken.lease if taken is not None else None
            rows = lease.rows() if lease is not None else []
            attempts = (
                [unit.attempts for unit in lease.units.values() for _ in unit.rows]
                if lease is not None
                else []
            )
            version = self._ledger.policy_version(name)
            spec = self._ledger.table(name).spec
            places = self._locate(name, chosen, rows)
        return TakeAnswer(
            status=status,
            policy_version=version,
            lease_id=lease.lease_id if lease is not None else "",
            table=project(spec, rows, places, attempts=attempts),
        )

    def read(self, name: str, request: ReadRequest) -> pa.Table:
        """Return rows without consuming them, oldest first or in the order of `uids`."""
        with self._locked():
            table = self._ledger.table(name)
            chosen = table.spec.checked_columns(request.columns)
            if request.uids is not None:
                found = (table.find(uid) for uid in dict.fromkeys(request.uids))
                rows = [row for row in found if row is not None]
            else:
                rows = table.some_rows(request.max_rows, newest=request.newest)
            if request.max_rows is not None:
                rows = rows[: request.max_rows]
            spec = table.spec
            places = self._locate(name, chosen, rows)
        return project(spec, rows, places)

    def _locate(self, name: str, columns: Sequence[str], rows: Sequence[Row]) -> Places:
        """Return places by column; columns of one part share them."""
        table = self._ledger.table(name)
        row_ids = [row.row_id for row in rows]
        writers = {column: table.spec.columns_by_name[column].writer for column in columns}
        by_writer = {
            writer: self._stores[name].locate(table.part_names.index(writer), row_ids)
            for writer in dict.fromkeys(writers.values())
        }
        return {column: by_writer[writer] for column, writer in writers.items()}

    # ---- finishing --------------------------------------------------------------------------------------------

    def ack(
        self,
        name: str,
        consumer: str,
        lease_id: str | None,
        uids: Sequence[str] | None,
        step: int | None = None,
    ) -> int:
        """Finish rows; see `TableState.ack`. `step` is the optimizer step that used them, kept for the statistics."""
        with self._locked():
            num_rows = self._ledger.ack(name, consumer, lease_id, uids)
            if step is not None:
                self._ledger.table(name).last_step[consumer] = step
            self._after(name)
            return num_rows

    def nack(
        self,
        name: str,
        consumer: str,
        lease_id: str | None,
        uids: Sequence[str] | None,
        *,
        reason: str,
        requeue: bool,
    ) -> int:
        """Give rows back or skip them; see `TableState.nack`."""
        with self._locked():
            num_rows = self._ledger.nack(name, consumer, lease_id, uids, reason=reason, requeue=requeue)
            self._after(name)
            return num_rows

    def renew(self, name: str, consumer: str, lease_id: str, lease_s: float) -> None:
        """Let a live lease last `lease_s` from now."""
        with self._locked():
            self._ledger.table(name).cursor(consumer).renew(lease_id, self.clock() + lease_s)

    def seal(self, name: str, expected_rows: int | None) -> None:
        """Declare the end of a table; see `TableState.seal`."""
        with self._locked():
            self._ledger.table(name).seal(expected_rows)
            self._after(name)

    def announce(self, name: str, policy_version: int) -> None:
        """Announce a policy version; see `Ledger.announce`."""
        with self._locked():
            self._ledger.announce(name, policy_version)
            self._after(name)

    def set_max_staleness(self, name: str, max_staleness: int) -> None:
        """Change a staleness bound; see `Ledger.set_max_staleness`."""
        with self._locked():
            self._ledger.set_max_staleness(name, max_staleness)
            self._after(name)

    def close(self) -> None:
        """Refuse all calls from now on and end those that wait."""
        with self._lock:
            self._is_closing = True
            self._notify(list(self._changed))

    # ---- waiting ----------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self):
        with self._lock:
            self._catch_up()
            yield

    def _catch_up(self) -> None:
        """Refuse to go on in a server that stops; end the leases whose time is over."""
        if self._is_closing:
            raise UnavailableError(
                "server: it must be running, got a call while it stops; connect to its successor"
            )
        for name in self._ledger.expire(self.clock()):
            self._after(name)

    def _after(self, name: str, *, has_changed: bool = True) -> None:
        """Free what was retired, and wake whoever may be concerned by a change of a table."""
        related = self._related(name)
        for each in related:
            table = self._ledger.tables[each]
            if table.dropped:
                self._count_lengths(each, table.dropped)
                table.dropped = []
            if table.retired:
                self._stores[each].free(table.retired)
                table.retired = []
                has_changed = True
        if has_changed:
            self._notify(related)

    def _related(self, name: str) -> list[str]:
        table = self._ledger.table(name)
        target = [table.spec.tickets.table] if table.spec.tickets else []
        sources = [source.spec.name for source in self._ledger.sources_of(name)]
        return [each for each in (name, *target, *sources) if each in self._ledger.tables]

    def _notify(self, names: Sequence[str]) -> None:
        for name in names:
            self._changed[name].notify_all()

    def _count_lengths(self, name: str, dropped: Sequence[Row]) -> None:
        """Dropping by age favours short answers: keep their lengths, so that people see it."""
        column = self._ledger.table(name).spec.columns_by_name.get("completion_token_ids")
        if column is not None and name in self._ledger.gates:
            places = self._locate(name, [column.name], dropped)[column.name]
            self._ledger.gates[name].count_dropped_lengths(lengths(places, column.name, column.type))

    def _wait(self, name: str, wait: Wait) -> bool:
        """Wait for a change of a table; return False once the deadline has passed."""
        now = self.clock()
        if now >= wait.deadline:
            return False
        if self._num_waiting >= self._max_waiting:
            raise OverloadedError(
                f"server: waiting calls must be at most {self._max_waiting}, got one more; "
                "use fewer members or shorter deadlines"
            )
        expiry = self._ledger.next_expiry()
        until = min(wait.deadline, now + CHECK_CALLER_S, math.inf if expiry is None else expiry)
        self._num_waiting += 1
        try:
            self._changed[name].wait(max(until - now, 0.0))
        finally:
            self._num_waiting -= 1
        self._catch_up()
        if wait.is_gone():
            raise DeadlineExceededError(
                f"table {name!r}: the caller must be waiting for the answer, got none"
            )
        return True


def _no_room(table: TableState, num_rows: int, num_bytes: int, free_bytes: int) -> str:
    return (
        f"put into {table.spec.name}: room for {num_rows} rows and {num_bytes} bytes must come before the deadline, "
        f"got {table.room} rows and {free_bytes} bytes; {_who_is_behind(table)}"
    )


def _who_is_behind(table: TableState) -> str:
    unfinished = {consumer.name: table.num_unfinished(consumer.name) for consumer in table.spec.consumers}
    if not unfinished:
        return "the table has no consumer, its rows stay until it is dropped"
    slowest = max(unfinished, key=lambda name: unfinished[name])
    held = ""
    if slowest in table.cursors:
        members = sorted({lease.member for lease in table.cursors[slowest].leases.values()})
        held = f", {table.cursors[slowest].num_leased()} of them leased by {members}" if members else ""
    return f"consumer {slowest!r} is furthest behind with {unfinished[slowest]} rows to finish{held}"
