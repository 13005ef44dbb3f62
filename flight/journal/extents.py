"""Where the values of live rows lie on disk: one extent a batch. Row numbers are packed arrays, never objects."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from flight.journal import records as r

TableKey = tuple[str, int]
"""Name of a table, and the decision that created it."""


@dataclass(slots=True)
class Extent:
    """A frame with rows. `row_ids` are int64, one a row of the batch, -1 for rows that are gone."""

    file: int
    role: Literal["log", "rows", "snapshot"]
    offset: int
    num_bytes: int
    seq: int
    put: r.Put
    row_ids: np.ndarray = field(repr=False)

    @property
    def num_live(self) -> int:
        """Return how many of its rows are not known to be gone."""
        return int(np.count_nonzero(self.row_ids >= 0))

    def new_parts(self) -> np.ndarray:
        """Return the bit set of parts that each row has here; int64."""
        if self.put.new_parts:
            return np.frombuffer(self.put.new_parts, np.int64)
        return np.full(len(self.row_ids), self.put.parts, np.int64)

    def record(self, key: TableKey) -> r.ExtentRecord:
        """Return what a checkpoint says about it."""
        put = r.Put(
            table=self.put.table,
            writers=self.put.writers,
            schema=self.put.schema,
            row_ids=self.row_ids.tobytes(),
            parts=self.put.parts,
            new_parts=self.put.new_parts,
        )
        return r.ExtentRecord(
            table=key[0],
            created=key[1],
            file=self.file,
            role=self.role,
            offset=self.offset,
            num_bytes=self.num_bytes,
            seq=self.seq,
            put=put,
        )


def extent_of(record: r.ExtentRecord) -> Extent:
    """Read what `Extent.record` wrote."""
    return Extent(
        file=record.file,
        role=record.role,
        offset=record.offset,
        num_bytes=record.num_bytes,
        seq=record.seq,
        put=record.put,
        row_ids=np.frombuffer(record.put.row_ids, np.int64),
    )


class ExtentIndex:
    """All extents by table. Not thread-safe."""

    def __init__(self) -> None:
        self.by_table: dict[TableKey, list[Extent]] = {}
        self.schemas: dict[int, bytes] = {}
        """Arrow schemas as IPC messages, by their number."""

    def add(self, key: TableKey, extent: Extent) -> None:
        """Note where a batch lies."""
        self.by_table.setdefault(key, []).append(extent)

    def replace(self, other: ExtentIndex) -> None:
        """Take over the extents of another index; schemas of what comes next stay."""
        self.by_table = other.by_table
        self.schemas |= other.schemas

    def live(self, rows: Mapping[TableKey, np.ndarray], seq: int) -> dict[TableKey, list[Extent]]:
        """Return what is left of the extents up to decision `seq` if only `rows` (row_ids, rising) are live."""
        return {key: _still_live(self.by_table.get(key, []), live, seq) for key, live in rows.items()}

    def forget(self, live: Mapping[TableKey, list[Extent]], seq: int) -> None:
        """Replace the extents up to decision `seq` by those of `live`, later ones stay."""
        for key in list(self.by_table):
            later = [extent for extent in self.by_table[key] if extent.seq > seq]
            kept = [*live.get(key, []), *later]
            if kept:
                self.by_table[key] = kept
            else:
                del self.by_table[key]
        used = {extent.put.schema for extents in self.by_table.values() for extent in extents}
        self.schemas = {number: schema for number, schema in self.schemas.items() if number in used}


def live_bytes(extents: Collection[Extent]) -> float:
    """Return about how many bytes of these frames belong to live rows."""
    return sum(
        extent.num_bytes * extent.num_live / len(extent.row_ids) for extent in extents if len(extent.row_ids)
    )


def _still_live(extents: list[Extent], live: np.ndarray, seq: int) -> list[Extent]:
    """Return the extents that hold live rows, the others' numbers set to -1; one search for all of them."""
    chosen = [extent for extent in extents if extent.seq <= seq]
    if not chosen or not len(live):
        return []
    row_ids = np.concatenate([extent.row_ids for extent in chosen])
    places = np.minimum(np.searchsorted(live, row_ids), len(live) - 1)
    row_ids = np.where(live[places] == row_ids, row_ids, -1)
    ends = np.cumsum([len(extent.row_ids) for extent in chosen])
    pieces = np.split(row_ids, ends[:-1])
    return [
        replace(extent, row_ids=piece)
        for extent, piece in zip(chosen, pieces, strict=True)
        if (piece >= 0).any()
    ]
