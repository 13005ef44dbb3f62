"""What a subscription needs beyond `take`: how its rows will look, and a way to be woken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from flight.broker.taking import BrokerTaking


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What a consumer's takes of `columns` look like, and how many rows are delivered as one."""

    columns: list[str]
    schema: pa.Schema
    unit_size: int


class BrokerPushing(BrokerTaking):
    """Takes that go on."""

    def delivery(self, name: str, consumer: str, columns: Sequence[str] | None) -> Delivery:
        """Return how takes of a consumer will look, whatever columns the table gets later.

        Raises:
            InvalidRequestError: the consumer has no queue, or a column is unknown.
        """
        with self._locked():
            table = self._ledger.table(name)
            unit_size = table.cursor(consumer).unit_size
            chosen = table.spec.columns_for(consumer, columns)
            nothing = self._locate_leased(name, chosen, consumer, None, ([], []))
        return Delivery(columns=chosen, schema=nothing.table().schema, unit_size=unit_size)

    def wake(self, name: str) -> None:
        """Let the calls that wait on a table look again whether their callers are still there."""
        with self._lock:
            if name in self._changed:
                self._notify([name])
