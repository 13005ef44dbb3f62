"""Putting an answer together whose columns lie in several places. No sockets: who has values is asked by a function.

Values are not copied: the pieces of each column are slices of what came, in the order of the rows. Small pieces are
joined.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa

from flight.data.store import joined
from flight.storage.addresses import from_runs, to_runs
from flight.storage.messages import Elsewhere, Endpoint, Run
from flight.storage.stubs import NOTE

MAX_AT_ONCE = 16
"""Owners that are asked at the same time."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Columns of some rows of an answer, all in one place."""

    table: str
    endpoint: Endpoint
    schema: pa.Schema
    positions: np.ndarray
    keys: pa.Table
    """The answer as far as it is there."""

    def uids(self) -> list[str]:
        """Return the uids of the rows."""
        return self.keys.column("uid").take(pa.array(self.positions)).to_pylist()

    def row_ids(self) -> np.ndarray:
        """Return the numbers of the rows in their table."""
        return self.keys.column("row_id").to_numpy()[self.positions]

    def row_id_runs(self) -> list[Run]:
        """Return the numbers of the rows in their table, as runs."""
        return to_runs(self.row_ids())


def is_elsewhere(table: pa.Table) -> bool:
    """Return whether columns of an answer are to be fetched."""
    return NOTE in (table.schema.metadata or {})


def gather_rows(table: pa.Table, fetch: Callable[[Part], pa.Table | None]) -> tuple[pa.Table, int]:
    """Return an answer with all its columns, and how many of its rows are missing from it because values were.

    `fetch` returns rows with row_id and the columns asked for, in any number and order; None for nothing. It is called
    in threads if there are several places to ask.
    """
    note = msgspec.json.decode(table.schema.metadata[NOTE], type=Elsewhere)
    schema = pa.ipc.read_schema(pa.py_buffer(note.arrow_schema))
    parts = [_part(table, note, endpoint, schema) for endpoint in note.endpoints]
    if len(parts) > 1:
        with ThreadPoolExecutor(min(len(parts), MAX_AT_ONCE), thread_name_prefix="gather") as pool:
            answers = list(pool.map(fetch, parts))
    else:
        answers = [fetch(part) for part in parts]
    found = [_indices(part, answer) for part, answer in zip(parts, answers, strict=True)]
    is_missing = np.zeros(table.num_rows, bool)
    for part, indices in zip(parts, found, strict=True):
        is_missing[part.positions[indices < 0]] = True
    num_missing = int(is_missing.sum())
    here = table.filter(pa.array(~is_missing)) if num_missing else table
    columns = []
    for field in schema:
        if field.name in table.column_names:
            columns.append(here.column(field.name))
            continue
        source = np.full(table.num_rows, -1, np.int64)
        index = np.zeros(table.num_rows, np.int64)
        for number, (part, indices) in enumerate(zip(parts, found, strict=True)):
            if field.name in part.endpoint.columns:
                source[part.positions], index[part.positions] = number, indices
        columns.append(_column(field, source[~is_missing], index[~is_missing], answers))
    notes = {key: value for key, value in (table.schema.metadata or {}).items() if key != NOTE}
    return joined(pa.Table.from_arrays(columns, schema=schema.with_metadata(notes or None))), num_missing


def _part(table: pa.Table, note: Elsewhere, endpoint: Endpoint, schema: pa.Schema) -> Part:
    return Part(
        table=note.table,
        endpoint=endpoint,
        schema=pa.schema([schema.field(name) for name in endpoint.columns]),
        positions=from_runs("owners: positions", endpoint.positions),
        keys=table,
    )


def _indices(part: Part, answer: pa.Table | None) -> np.ndarray:
    """Return where each row of a part is in what came, -1 where it is not."""
    wanted = part.row_ids()
    if answer is None:
        return np.full(len(wanted), -1, np.int64)
    came = answer.column("row_id").to_numpy()
    if np.array_equal(came, wanted):
        return np.arange(len(wanted))
    index_of = {row_id: index for index, row_id in enumerate(came.tolist())}
    return np.array([index_of.get(row_id, -1) for row_id in wanted.tolist()], np.int64)


def _column(
    field: pa.Field, source: np.ndarray, index: np.ndarray, answers: list[pa.Table | None]
) -> pa.ChunkedArray:
    """Return one column, row by row from `answers[source]` at `index`; null where source is -1. Shapes [num_rows]."""
    pieces: list[pa.Array] = []
    if len(source):
        is_new = (np.diff(source) != 0) | ((np.diff(index) != 1) & (source[1:] >= 0))
        starts = np.concatenate([[0], np.flatnonzero(is_new) + 1])
        ends = np.append(starts[1:], len(source))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            answer = answers[source[start]] if source[start] >= 0 else None
            if answer is None:
                pieces.append(pa.nulls(end - start, field.type))
            else:
                pieces += answer.column(field.name).slice(int(index[start]), end - start).chunks
    return pa.chunked_array(pieces, field.type)
