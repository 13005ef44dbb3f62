"""Where the values of one table's rows lie: retained Arrow batches, found by row and part. Not thread-safe.

It is not the table: which rows exist and who may have them is decided in `flight.table`. No value is touched by
Python: rows are found by (batch, index), copied out as slices or with `take`.

A batch is kept until its last row is gone; when less than half of its rows are left, these are copied out and the
rest is freed, so that what is retained is at most about twice what is alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pyarrow as pa

MIN_COMPACT_BYTES = 64 << 10
"""Chunks smaller than this are not worth copying."""

COMBINE_BELOW_BYTES = 256 << 10
"""Pieces that are smaller than this on average are joined before they travel."""

TARGET_BATCH_BYTES = 2 << 20
"""Size of the batches that travel; 1 to 4 MB are fastest on Flight."""

MAX_COMBINE_BYTES = 1 << 30
"""Above this, joining could overflow the 32-bit offsets of lists and strings."""


def retain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Copy a batch into one buffer of its own.

    Received batches are slices of one gRPC message: keeping a small part of one would keep all of it.
    """
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema)


class Chunk:
    """One retained batch and the rows that still need it; `index_of` is their place in it."""

    __slots__ = ("batch", "index_of", "nbytes", "where")

    def __init__(self, batch: pa.RecordBatch, index_of: dict[int, int]) -> None:
        self.batch = batch
        self.index_of = index_of
        self.nbytes = batch.nbytes
        self.where: Literal["memory", "moving", "disk"] = "memory"


Place = tuple[pa.RecordBatch, int]
"""A batch and the row's index in it; both stay valid whatever happens to the store."""


class ColumnStore:
    """Chunks of one table, by part."""

    def __init__(self, num_parts: int) -> None:
        self.nbytes = 0
        """Bytes retained, counted by us: Arrow's counters also hold what is in transit."""
        self.disk_nbytes = 0
        """Those of them that lie on disk."""
        self.disk_retry_at: float | None = None
        """When to try the disk again that took no more; None while it works."""
        self._chunk_of: list[dict[int, Chunk]] = [{} for _ in range(num_parts)]
        self._in_memory: dict[int, Chunk] = {}

    @property
    def num_parts(self) -> int:
        """Return how many parts a row may have."""
        return len(self._chunk_of)

    def add_part(self) -> None:
        """Make room for one more part of each row."""
        self._chunk_of.append({})

    def add(self, part: int, batch: pa.RecordBatch, row_ids: Sequence[int]) -> None:
        """Keep a batch that `retain` copied, as part number `part` of its rows; a negative row_id is not kept."""
        index_of = {row_id: index for index, row_id in enumerate(row_ids) if row_id >= 0}
        if not index_of:
            return
        chunk = Chunk(batch, index_of)
        self.nbytes += chunk.nbytes
        self._in_memory[id(chunk)] = chunk
        self._chunk_of[part].update(dict.fromkeys(index_of, chunk))
        self._compact(chunk)

    def free(self, row_ids: Sequence[int]) -> None:
        """Forget rows and give back the memory that only they needed."""
        for chunk_of in self._chunk_of:
            touched = {}
            for row_id in row_ids:
                chunk = chunk_of.pop(row_id, None)
                if chunk is not None:
                    del chunk.index_of[row_id]
                    touched[id(chunk)] = chunk
            for chunk in touched.values():
                self._compact(chunk)

    def locate(self, part: int, row_ids: Sequence[int]) -> list[Place | None]:
        """Return where each row's part lies, None where it has not come."""
        chunk_of = self._chunk_of[part]
        places: list[Place | None] = []
        for row_id in row_ids:
            chunk = chunk_of.get(row_id)
            places.append(None if chunk is None else (chunk.batch, chunk.index_of[row_id]))
        return places

    def _compact(self, chunk: Chunk) -> None:
        num_left = len(chunk.index_of)
        if not num_left:
            self.nbytes -= chunk.nbytes
            self.disk_nbytes -= chunk.nbytes if chunk.where == "disk" else 0
            self._in_memory.pop(id(chunk), None)
        elif (
            chunk.where != "disk" and num_left * 2 < chunk.batch.num_rows and chunk.nbytes > MIN_COMPACT_BYTES
        ):
            self.nbytes -= chunk.nbytes
            chunk.batch = chunk.batch.take(pa.array(list(chunk.index_of.values()), pa.int64()))
            chunk.index_of = {row_id: index for index, row_id in enumerate(chunk.index_of)}
            chunk.nbytes = chunk.batch.nbytes
            self.nbytes += chunk.nbytes

    # ---- disk -------------------------------------------------------------------------------------------------

    def overflow(self, memory_bytes: int) -> list[Chunk]:
        """Return the oldest chunks that must leave memory so that `memory_bytes` are held; `moved` must follow."""
        excess = self.nbytes - self.disk_nbytes - memory_bytes
        excess -= sum(chunk.nbytes for chunk in self._in_memory.values() if chunk.where == "moving")
        chosen = []
        for chunk in self._in_memory.values():
            if excess <= 0:
                break
            if chunk.where == "memory":
                chunk.where = "moving"
                chosen.append(chunk)
                excess -= chunk.nbytes
        return chosen

    def moved(self, chunk: Chunk, original: pa.RecordBatch, batch: pa.RecordBatch | None) -> None:
        """Note where a chunk lies now: in `batch` on disk, or, if that is None, still in memory."""
        chunk.where = "memory"
        if batch is not None and chunk.index_of and chunk.batch is original:
            chunk.batch = batch
            chunk.where = "disk"
            self.disk_nbytes += chunk.nbytes
            self._in_memory.pop(id(chunk), None)


def gather(places: Sequence[Place | None], column: str, arrow_type: pa.DataType) -> pa.ChunkedArray:
    """Return one column of rows, in order: slices of batches where rows lie side by side, copies where they do not."""
    pieces = []
    start = 0
    while start < len(places):
        first = places[start]
        end = start + 1
        if first is None:
            while end < len(places) and places[end] is None:
                end += 1
            pieces.append(pa.nulls(end - start, arrow_type))
        else:
            indices = [first[1]]
            while end < len(places) and (place := places[end]) is not None and place[0] is first[0]:
                indices.append(place[1])
                end += 1
            pieces.append(_pick(first[0], column, indices, arrow_type))
        start = end
    return pa.chunked_array(pieces, arrow_type)


def _pick(batch: pa.RecordBatch, column: str, indices: list[int], arrow_type: pa.DataType) -> pa.Array:
    position = batch.schema.get_field_index(column)
    if position < 0:
        return pa.nulls(len(indices), arrow_type)
    values = batch.column(position)
    if indices == list(range(indices[0], indices[0] + len(indices))):
        return values.slice(indices[0], len(indices))
    return values.take(pa.array(indices, pa.int64()))


def cut(table: pa.Table, target_bytes: int = TARGET_BATCH_BYTES) -> pa.Table:
    """Return the same rows in batches of about 2 MB; many small pieces are joined, few large ones are not copied."""
    if not table.num_rows:
        return table
    table = joined(table)
    rows = max(1, table.num_rows * target_bytes // max(table.nbytes, 1))
    return pa.Table.from_batches(table.to_batches(max_chunksize=rows), table.schema)


def joined(table: pa.Table) -> pa.Table:
    """Return the same rows in fewer pieces if these are small and many; large ones are not copied."""
    num_pieces = max((column.num_chunks for column in table.columns), default=0)
    if num_pieces > 1 and table.nbytes < min(num_pieces * COMBINE_BELOW_BYTES, MAX_COMBINE_BYTES):
        return table.combine_chunks()
    return table
