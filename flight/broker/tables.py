"""Making, changing and describing tables, under the broker's lock.

`flight.state.ledger` decides what a change means.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from flight.broker import remote
from flight.broker.core import BrokerCore
from flight.data.store import ColumnStore
from flight.errors import InvalidRequestError
from flight.schema import Column, ConsumerSpec, TableSpec
from flight.state.statistics import table_statistics


class BrokerTables(BrokerCore):
    """The verbs of whole tables."""

    def create_table(self, spec: TableSpec, *, exist_ok: bool) -> None:
        """Add a table; see `Ledger.create`."""
        if spec.spill and self._spill is None:
            raise InvalidRequestError(
                f"create_table {spec.name}: spill must be false on a server without a directory for it, got true; "
                "start it with --spill-dir"
            )
        with self._locked():
            if self._ledger.create(spec, exist_ok=exist_ok):
                self._add_store(spec.name)

    def _add_store(self, name: str) -> None:
        self._stores[name] = ColumnStore(len(self._ledger.table(name).part_names))
        self._changed[name] = threading.Condition(self._lock)

    def alter_table(
        self, name: str, columns: Sequence[Column], consumers: Sequence[ConsumerSpec]
    ) -> TableSpec:
        """Add nullable columns and consumers; return what the table is now. See `Ledger.alter`."""
        with self._locked():
            if self._ledger.alter(name, columns, consumers):
                self._widen_store(name)
                self._after(name)
            return self._ledger.table(name).spec

    def _widen_store(self, name: str) -> None:
        while self._stores[name].num_parts < len(self._ledger.table(name).part_names):
            self._stores[name].add_part()

    def truncate_table(self, name: str) -> int:
        """Remove all rows of a table and return how many; calls that wait look again. See `Ledger.truncate`."""
        with self._locked():
            num_rows = self._ledger.truncate(name)
            self._after(name)
            return num_rows

    def drop_table(self, name: str) -> None:
        """Remove a table; calls that wait on it are answered with TableNotFoundError."""
        with self._locked():
            self._drop(name)

    def _drop(self, name: str) -> None:
        related = [each for each in self._related(name) if each != name]
        table = self._ledger.table(name)
        row_ids = list(table.rows)
        targets = self._ledger.drop(name)
        if self._owners.has_stubs:
            remote.let_go(self._owners, table, self._stores[name], row_ids)
            self._owner_news.notify_all()
        del self._stores[name]
        self._stub_specs.pop(name, None)
        self._owners.remote_bytes.pop(name, None)
        self._changed.pop(name).notify_all()
        for target in targets:
            self._after(target)
        self._notify(list(self._changed) if self._num_waiting_for_server else related)

    def list_tables(self) -> list[str]:
        """Return the names of the tables."""
        with self._locked():
            return sorted(self._ledger.tables)

    def describe(self, name: str) -> TableSpec:
        """Return a table's specification."""
        with self._locked():
            return self._ledger.table(name).spec

    def held_by(self, member: str) -> list[tuple[str, str, str]]:
        """Return (table, consumer, lease) of all leases of a member, under whichever principal's name."""
        with self._locked():
            return [
                (name, cursor.name, lease.lease_id)
                for name, table in self._ledger.tables.items()
                for cursor in table.cursors.values()
                for lease in cursor.leases.values()
                if lease.member == member or lease.member.endswith(f"/{member}")
            ]

    def forget_lease(self, name: str, consumer: str, lease_id: str) -> None:
        """Have an ack of a lease that was given back refused, instead of answered as a repetition."""
        with self._locked():
            self._ledger.table(name).cursor(consumer).void([lease_id])

    def size(self, name: str) -> tuple[int, int]:
        """Return rows and bytes of a table."""
        with self._locked():
            remote_bytes = self._owners.remote_bytes.get(name, 0)
            return len(self._ledger.table(name).rows), self._stores[name].nbytes + remote_bytes

    def stats(self, name: str | None = None) -> dict[str, Any]:
        """Return statistics by table name."""
        with self._locked():
            tables = self._ledger.tables if name is None else {name: self._ledger.table(name)}
            return {
                each: table_statistics(table, self._ledger.gates.get(each), self._stores[each].nbytes)
                | {
                    "disk_bytes": self._stores[each].disk_nbytes,
                    "remote_bytes": self._owners.remote_bytes.get(each, 0),
                }
                for each, table in tables.items()
            }
