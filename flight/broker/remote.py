"""Rows whose values lie with storage servers, as the books of one table show them. No state, no lock.

The places of such rows are in stubs (`flight.storage.stubs`); the sums are kept in `flight.storage.book`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from flight.data.store import ColumnStore, Run
from flight.state.leases import Row
from flight.storage import addresses
from flight.storage.book import OwnerBook
from flight.storage.stubs import Stub, addresses_at, bytes_at, bytes_column, have_come
from flight.table import PutOutcome, TableState


def note_added(
    book: OwnerBook, table: TableState, stub: Stub, parts: Mapping[str, pa.RecordBatch], outcome: PutOutcome
) -> None:
    """Note the rows of a stub that were put and had something new."""
    new = np.array(outcome.new_parts, np.int64)
    num_bytes = 0
    for writer, data in parts.items():
        is_added = (new >> table.part_names.index(writer)) & 1
        num_bytes += int((data.column(bytes_column(writer)).to_numpy() * is_added).sum())
    book.add(table.spec.name, stub, int((new != 0).sum()), num_bytes)


def let_go(book: OwnerBook, table: TableState, store: ColumnStore, row_ids: Sequence[int]) -> bool:
    """Note that rows leave a table; return whether an owner has values of theirs. The store still has them."""
    found, num_bytes = [], 0
    for writer, runs in _parts(table, store, row_ids):
        found.append(addresses_at(runs, writer))
        num_bytes += bytes_at(runs, writer)
    return book.free(table.spec.name, found, num_bytes)


def rows_of(table: TableState, store: ColumnStore, owner: int) -> list[Row]:
    """Return the rows of which an owner has any value; looks at all rows."""
    rows = list(table.rows.values())
    is_there = np.zeros(len(rows), bool)
    for writer, runs in _parts(table, store, [row.row_id for row in rows]):
        is_there |= addresses.owners_of(addresses_at(runs, writer)) == owner
    return [rows[index] for index in np.flatnonzero(is_there).tolist()]


def single_addresses(table: TableState, store: ColumnStore, row_ids: Sequence[int]) -> np.ndarray:
    """Return for each row the one address at which all its values lie, -1 if there is no such."""
    single = np.full(len(row_ids), -1, np.int64)
    is_mixed = np.zeros(len(row_ids), bool)
    for writer, runs in _parts(table, store, row_ids):
        found = addresses_at(runs, writer)
        has_come = have_come(runs)
        is_mixed |= has_come & ((found < 0) | ((single >= 0) & (single != found)))
        single = np.where(has_come, found, single)
    return np.where(is_mixed, -1, single)


def _parts(table: TableState, store: ColumnStore, row_ids: Sequence[int]) -> list[tuple[str, list[Run]]]:
    return [(writer, store.locate(part, row_ids)) for part, writer in enumerate(table.part_names)]
