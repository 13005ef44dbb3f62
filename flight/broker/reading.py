"""Looking at rows without consuming them: all, a range, by uid, by filter. Rows are found under the lock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flight.broker.core import BrokerCore
from flight.data.filters import columns_of, matches, parse_filter
from flight.data.projection import project
from flight.data.store import choose
from flight.schema import KEY_COLUMNS
from flight.state.leases import Row
from flight.table import TableState


@dataclass(frozen=True, kw_only=True)
class ReadRequest:
    """Rows to look at: all, those of `uids` that are there, or the first (`newest`: last) `max_rows`.

    first_row_id, last_row_id: the range to look in, both ends included.
    filter: what rows must match, see `flight.data.filters`; `max_rows` counts the rows that do.
    """

    columns: Sequence[str] | None = None
    uids: Sequence[str] | None = None
    max_rows: int | None = None
    newest: bool = False
    first_row_id: int | None = None
    last_row_id: int | None = None
    filter: Mapping[str, Any] | None = None


class BrokerReading(BrokerCore):
    """The verbs that change nothing."""

    def missing(self, name: str, uids: Sequence[str]) -> list[str]:
        """Return those of `uids` that are not in the table now, each once, in order."""
        with self._locked():
            self._ledger.table(name)
            return self._ledger.references.missing(name, uids)

    def read(self, name: str, request: ReadRequest, *, is_direct: bool = False) -> pa.Table:
        """Return rows without consuming them, oldest first or in the order of `uids`.

        Raises:
            InvalidRequestError: a column, or something in the filter, does not fit the table.
        """
        with self._locked():
            table = self._ledger.table(name)
            spec = table.spec
            chosen = spec.checked_columns(request.columns)
            condition = None
            if request.filter is not None:
                condition = parse_filter(f"read {name}", request.filter, spec.arrow_schema())
            rows = _candidates(table, request, is_filtered=condition is not None)
            looked_at = columns_of(condition) if condition is not None else []
            extra = [each for each in looked_at if each not in KEY_COLUMNS]
            places = self._locate(name, list(dict.fromkeys([*chosen, *extra])), rows)
            owners = self._owners.locations
        if condition is not None:
            looked = project(spec, rows, {each: places[each] for each in extra}, owners=owners)
            if (found := self._whole(name, looked, is_direct=False)).num_rows < len(rows):
                return self.read(name, request, is_direct=is_direct)  # Rows were lost meanwhile.
            passing = pc.indices_nonzero(matches(condition, found)).to_pylist()
            kept = _limited(passing, request)
            rows = [rows[index] for index in kept]
            places = {column: choose(runs, kept) for column, runs in places.items()}
        answer = project(spec, rows, {column: places[column] for column in chosen}, owners=owners)
        return self._whole(name, answer, is_direct=is_direct)


def _candidates(table: TableState, request: ReadRequest, *, is_filtered: bool) -> list[Row]:
    """Return the rows that the request names; without a filter no more than it wants."""
    ranged = request.first_row_id is not None or request.last_row_id is not None
    if request.uids is not None:
        found = (table.find(uid) for uid in dict.fromkeys(request.uids))
        rows = [row for row in found if row is not None]
    elif ranged or is_filtered:
        rows = table.some_rows(None, newest=False)
    else:
        return table.some_rows(request.max_rows, newest=request.newest)
    first, last = request.first_row_id, request.last_row_id
    rows = [
        row for row in rows if (first is None or row.row_id >= first) and (last is None or row.row_id <= last)
    ]
    if is_filtered:
        return rows
    return [rows[index] for index in _limited(range(len(rows)), request)]


def _limited(indices: Sequence[int], request: ReadRequest) -> Sequence[int]:
    if request.max_rows is None:
        return indices
    by_age = request.newest and request.uids is None
    return indices[max(0, len(indices) - request.max_rows) :] if by_age else indices[: request.max_rows]
