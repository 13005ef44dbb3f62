"""What every part of the broker shares: the tables, the lock, the clock, and waiting for a change.

It has no verbs: `flight.broker.tables` makes and changes tables, `flight.broker.room` admits rows, `flight.broker`
puts, takes and finishes them. A wait ends when the table (or one tied to it by tickets) changes, a lease expires, the
deadline passes or the caller is gone.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import structlog

from flight.broker import remote
from flight.data.batches import SchemaBook
from flight.data.projection import Places
from flight.data.spill import SpillDirectory
from flight.data.store import ColumnStore
from flight.errors import DeadlineExceededError, OverloadedError, UnavailableError
from flight.schema import TableSpec
from flight.state.leases import Row
from flight.state.ledger import Ledger
from flight.state.sizes import can_be_sized, sizes_of
from flight.storage.book import OwnerBook
from flight.storage.stubs import NOTE

CHECK_CALLER_S = 1.0
"""How often a waiting call looks whether its caller is still there."""

LOG = structlog.get_logger("flight.broker")


@dataclass(frozen=True, kw_only=True)
class Wait:
    """How long a call may wait. `deadline` is on the broker's clock; `is_gone` tells that nobody wants the answer."""

    deadline: float
    is_gone: Callable[[], bool] = lambda: False


class _Section:
    """The lock, and what must be done once it is held. Entered four times a row: a generator costs three times that."""

    def __init__(self, lock: threading.RLock, begin: Callable[[], None]) -> None:
        self._lock = lock
        self._begin = begin

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self._begin()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


class BrokerCore:
    """Tables, values and one lock. Everything with a leading underscore needs the lock."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        lease_prefix: str = "",
        max_waiting: int = 1024,
        capacity_bytes: int | None = None,
        spill: SpillDirectory | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.clock = clock
        self.capacity_bytes = capacity_bytes
        """Bytes that all tables together may retain, in memory and on disk; None for no bound but their own."""
        self._spill = spill
        self._num_waiting_for_server = 0
        self._ledger = ledger or Ledger(lease_prefix=lease_prefix)
        self._stores: dict[str, ColumnStore] = {}
        self._lock = threading.RLock()
        self._changed: dict[str, threading.Condition] = {}
        self._schemas = SchemaBook()
        self._section = _Section(self._lock, self._catch_up)
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._is_closing = False
        self._owners = OwnerBook()
        self._stub_specs: dict[str, tuple[TableSpec, TableSpec]] = {}
        """By table: its specification, and what its stubs follow."""
        self._owner_news = threading.Condition(self._lock)
        self.relay: Callable[[str, pa.Table], pa.Table] | None = None
        """Fetches what lies with storage servers for callers that do not; called without the lock."""

    @property
    def remembers(self) -> bool:
        """Return whether tables outlive the server."""
        return False

    def journal_stats(self) -> dict[str, Any] | None:
        """Return what a journal has done; None without one."""
        return None

    def close(self) -> None:
        """Refuse all calls from now on and end those that wait."""
        with self._lock:
            self._is_closing = True
            self._notify(list(self._changed))
            self._owner_news.notify_all()

    # ---- waiting ----------------------------------------------------------------------------------------------

    def _locked(self) -> AbstractContextManager[None]:
        return self._section

    def _catch_up(self) -> None:
        """Refuse to go on in a server that stops; end the leases whose time is over."""
        if self._is_closing:
            raise UnavailableError(
                "server: it must be running, got a call while it stops; connect to its successor"
            )
        for name in self._ledger.expire(self.clock()):
            self._after(name)
        if self._owners.locations:
            for owner in self._owners.silent(self.clock()):
                self._lose(owner, "it has been silent for too long")

    def _after(self, name: str, *, has_changed: bool = True) -> None:
        """Free what was retired, and wake whoever may be concerned by a change of a table."""
        related = self._related(name)
        for each in related:
            table = self._ledger.tables[each]
            if table.measured:
                self._count_lengths(each, table.measured)
                table.measured = []
            if table.retired:
                if self._owners.has_stubs and remote.let_go(
                    self._owners, table, self._stores[each], table.retired
                ):
                    self._owner_news.notify_all()
                self._stores[each].free(table.retired)
                gone, table.retired = table.retired, []
                for target in self._ledger.references.leave(each, gone):
                    self._after(target)
                has_changed = True
                if self._num_waiting_for_server:
                    related = list(self._changed)
        if has_changed:
            self._notify(related)

    def _related(self, name: str) -> list[str]:
        tables = self._ledger.tables
        tickets = self._ledger.table(name).spec.tickets
        related = [name] if tickets is None or tickets.table not in tables else [name, tickets.table]
        if len(tables) > 1:
            related += [source.spec.name for source in self._ledger.sources_of(name)]
        return related

    def _notify(self, names: Sequence[str]) -> None:
        for name in names:
            self._changed[name].notify_all()

    def _count_lengths(self, name: str, measured: Sequence[tuple[str, Row]]) -> None:
        """Dropping by age favours short answers: keep the lengths of both sides, so that people see it."""
        column = self._ledger.table(name).spec.columns_by_name.get("completion_token_ids")
        if column is None or not can_be_sized(column.type) or name not in self._ledger.gates:
            return
        places = self._locate(name, [column.name], [row for _, row in measured])[column.name]
        for (kind, _), num_tokens in zip(measured, sizes_of(places, column.name), strict=True):
            self._ledger.gates[name].count_length(kind, num_tokens)

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

    # ---- storage servers --------------------------------------------------------------------------------------

    def _lose(self, owner: int, why: str) -> None:
        """Give a storage server up; rows of which it has values, and what refers to them, leave. Idempotent."""
        num_lost = 0
        for name in list(self._ledger.tables) if self._owners.has_stubs else ():
            rows = remote.rows_of(self._ledger.table(name), self._stores[name], owner)
            if rows:
                for each, num_rows in self._ledger.lose(name, rows).items():
                    num_lost += num_rows
                    self._after(each)
        location = self._owners.remove(owner, num_lost)
        if location:
            log = LOG.warning if num_lost else LOG.info
            log("a storage server is gone", location=location, why=why, num_lost_rows=num_lost)
            self._owner_news.notify_all()

    def _whole(self, name: str, table: pa.Table, *, is_direct: bool) -> pa.Table:
        """Return an answer with what lies elsewhere fetched, unless its caller fetches that directly.

        Called without the lock. Rows that were lost on the way are left out.
        """
        if is_direct or self.relay is None or NOTE not in (table.schema.metadata or {}):
            return table
        return self.relay(name, table)

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
