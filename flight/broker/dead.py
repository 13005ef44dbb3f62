"""Dead letters under the broker's lock: looking at them, with their reasons, and making them ready again."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pyarrow as pa

from flight.broker.core import BrokerCore
from flight.data.projection import project
from flight.errors import InvalidRequestError
from flight.state.deadletters import DEAD_COLUMNS

_NOTES = (
    (pa.string(), "the consumer that gave the row up"),
    (pa.int32(), "how often it had been delivered"),
    (pa.string(), "why it was given back the last time"),
)


class BrokerDead(BrokerCore):
    """The verbs of rows that were given up."""

    def read_dead(
        self,
        name: str,
        *,
        consumer: str | None = None,
        columns: Sequence[str] | None = None,
        uids: Collection[str] | None = None,
        max_rows: int | None = None,
    ) -> pa.Table:
        """Return dead letters, oldest first, with `DEAD_COLUMNS`; a row given up by two consumers comes twice."""
        with self._locked():
            table = self._ledger.table(name)
            known = [each.name for each in table.spec.consumers]
            if consumer is not None and consumer not in known:
                raise InvalidRequestError(f"read {name}: consumer must be one of {known}, got {consumer!r}")
            chosen = table.spec.checked_columns(columns)
            dead = [
                (row, letter)
                for letter in table.dead.of(consumer, uids)
                for row in letter.rows
                if uids is None or row.uid in uids
            ][:max_rows]
            rows = [row for row, _ in dead]
            spec = table.spec
            places = self._locate(name, chosen, rows)
            owners = self._owners.locations
        answer = self._whole(name, project(spec, rows, places, owners=owners), is_direct=False)
        if answer.num_rows < len(rows):  # Values were lost on the way, and their rows with them.
            return self.read_dead(name, consumer=consumer, columns=columns, uids=uids, max_rows=max_rows)
        values = (
            [letter.consumer for _, letter in dead],
            [letter.attempts for _, letter in dead],
            [letter.reason for _, letter in dead],
        )
        for column, (arrow_type, meaning), each in zip(DEAD_COLUMNS, _NOTES, values, strict=True):
            field = pa.field(column, arrow_type, metadata={"meaning": meaning})
            answer = answer.append_column(field, pa.array(each, arrow_type))
        return answer

    def requeue(self, name: str, consumer: str, uids: Collection[str] | None) -> int:
        """Make dead letters of a consumer ready again; see `TableState.requeue`."""
        with self._locked():
            num_rows = self._ledger.requeue(name, consumer, None if uids is None else set(uids))
            self._after(name)
            return num_rows
