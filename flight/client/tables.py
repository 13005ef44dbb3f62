"""The client's verbs that change tables and bring dead letters back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa

from flight import messages as m
from flight.client.calls import ClientCalls
from flight.schema import Column, ConsumerSpec, TableSpec


class TablesClient(ClientCalls):
    """Changes to tables in use, and where their values are."""

    def storage_servers(self) -> list[dict[str, Any]]:
        """Return the storage servers that have joined; see `flight.storage.messages.OwnerInfo`."""
        return self._act("placement", m.Request(identity=self.identity))["owners"]

    def alter_table(
        self, table: str, *, columns: Sequence[Column] = (), consumers: Sequence[ConsumerSpec] = ()
    ) -> TableSpec:
        """Add nullable columns and consumers to a table in use; return what it is now. Idempotent.

        Rows that are there have nulls in a new column. A new consumer starts at the oldest row that is still there.
        """
        schema = pa.schema([column.to_field() for column in columns])
        request = m.AlterTable(
            table=table,
            arrow_schema=schema.serialize().to_pybytes(),
            consumers=tuple(consumers),
            identity=self.identity,
        )
        return m.to_spec(msgspec.convert(self._act("alter_table", request), m.CreateTable))

    def missing(self, table: str, uids: Sequence[str]) -> list[str]:
        """Return those of `uids` that are not in the table now: what has to be put before rows may refer to it."""
        return self._act("missing", m.MissingRequest(table=table, uids=list(uids), identity=self.identity))

    def truncate_table(self, table: str) -> int:
        """Remove all rows; leases are void, tickets returned, the end forgotten. Returns how many rows there were."""
        return self._act("truncate_table", m.TableRequest(table=table, identity=self.identity), retry=False)

    def requeue(self, table: str, consumer: str, uids: Sequence[str] | None = None) -> int:
        """Make dead letters of a consumer ready again, all or those of `uids`; return how many rows. Idempotent."""
        return self._act(
            "requeue",
            m.Requeue(
                table=table,
                consumer=consumer,
                uids=None if uids is None else list(uids),
                identity=self.identity,
            ),
        )
