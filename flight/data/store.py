"""Where the values of one table's rows lie: retained Arrow batches, found by row and part. Not thread-safe.

It is not the table: which rows exist and who may have them is decided in `flight.table`. No value is touched by
Python: rows are found as runs of one batch, and leave as slices of it or by `take`.

A batch is kept until its last row is gone; when less than half of its rows are left, these are copied out and the
rest is freed, so that what is retained is at most about twice what is alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise, repeat
from operator import itemgetter
from typing import Literal, NamedTuple

import pyarrow as pa

MIN_COMPACT_BYTES = 64 << 10
"""Chunks smaller than this are not worth copying."""

COMBINE_BELOW_BYTES = 256 << 10
"""Pieces that are smaller than this on average are joined before they travel."""

TARGET_BATCH_BYTES = 2 << 20
"""Size of the batches that travel; 1 to 4 MB are fastest on Flight."""

LONG_LIST = 512
"""Values a list on average from which rows are copied one by one."""

MAX_COMBINE_BYTES = 1 << 30
"""Above this, joining could overflow the 32-bit offsets of lists and strings."""


def retain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Copy a batch into one buffer of its own.

    Received batches are slices of one gRPC message: keeping a small part of one would keep all of it.
    """
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema)


def held_bytes(batch: pa.RecordBatch) -> int:
    """Return the bytes that keeping a retained batch keeps: those of its buffers, which hold its rows and no others.

    The same as `nbytes`, which takes a hundred times as long: it looks at the offsets of each column.
    """
    return int(batch.get_total_buffer_size())


class Chunk:
    """One retained batch; `row_ids` are its rows by place, negative for those that are not kept.

    Nearly always the rows of a batch have come together, so that their numbers follow one another: then a place is a
    subtraction. Otherwise places are looked up in a dictionary, made when the first row is asked for.
    """

    __slots__ = ("_index_of", "batch", "nbytes", "num_left", "row_ids", "where")

    def __init__(self, batch: pa.RecordBatch, row_ids: Sequence[int], num_kept: int) -> None:
        self.nbytes = 0
        self.num_left = num_kept
        """Rows that still need the batch."""
        self.where: Literal["memory", "moving", "disk"] = "memory"
        self.replace(batch, row_ids)

    def replace(self, batch: pa.RecordBatch, row_ids: Sequence[int]) -> None:
        """Hold these rows instead."""
        self.batch = batch
        self.nbytes = held_bytes(batch)
        self.row_ids = _as_range(row_ids) or row_ids
        self._index_of: dict[int, int] | None = None

    def run(self, row_ids: Sequence[int]) -> Run:
        """Return where rows of this chunk lie."""
        wanted = _as_range(row_ids)
        if isinstance(self.row_ids, range):
            first = self.row_ids[0]
            if wanted is not None:
                return Run(self.batch, range(wanted[0] - first, wanted[-1] + 1 - first))
            return Run(self.batch, [row_id - first for row_id in row_ids])
        if self._index_of is None:
            self._index_of = {row_id: index for index, row_id in enumerate(self.row_ids)}
        indices = list(map(self._index_of.__getitem__, row_ids))
        return Run(self.batch, _as_range(indices) or indices)


class Run(NamedTuple):
    """Rows that are wanted one after the other and lie in one batch; no batch means that they have not come.

    `indices` is a range where they lie side by side. A run stays valid whatever happens to the store.
    """

    batch: pa.RecordBatch | None
    indices: Sequence[int]


def _as_range(numbers: Sequence[int]) -> range | None:
    """Return numbers that follow one another as a range, None if they do not."""
    found = range(numbers[0], numbers[0] + len(numbers))
    return found if numbers[-1] == found[-1] and list(numbers) == list(found) else None


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
        kept = row_ids if not row_ids or min(row_ids) >= 0 else [row_id for row_id in row_ids if row_id >= 0]
        if not kept:
            return
        chunk = Chunk(batch, row_ids, len(kept))
        self.nbytes += chunk.nbytes
        self._in_memory[id(chunk)] = chunk
        self._chunk_of[part].update(dict.fromkeys(kept, chunk))
        self._compact(part, chunk)

    def free(self, row_ids: Sequence[int]) -> None:
        """Forget rows and give back the memory that only they needed."""
        for part, chunk_of in enumerate(self._chunk_of):
            for chunk, num_rows in Counter(map(chunk_of.pop, row_ids, repeat(None))).items():
                if chunk is not None:
                    chunk.num_left -= num_rows
                    self._compact(part, chunk)

    def locate(self, part: int, row_ids: Sequence[int]) -> list[Run]:
        """Return where a part of rows lies, in their order."""
        runs: list[Run] = []
        start = 0
        for chunk, same in groupby(map(self._chunk_of[part].get, row_ids)):
            end = start + len(list(same))
            runs.append(Run(None, range(end - start)) if chunk is None else chunk.run(row_ids[start:end]))
            start = end
        return runs

    def _compact(self, part: int, chunk: Chunk) -> None:
        if not chunk.num_left:
            self.nbytes -= chunk.nbytes
            self.disk_nbytes -= chunk.nbytes if chunk.where == "disk" else 0
            self._in_memory.pop(id(chunk), None)
        elif (
            chunk.where != "disk"
            and chunk.num_left * 2 < chunk.batch.num_rows
            and chunk.nbytes > MIN_COMPACT_BYTES
        ):
            self.nbytes -= chunk.nbytes
            chunk_of = self._chunk_of[part]
            left = [index for index, row_id in enumerate(chunk.row_ids) if chunk_of.get(row_id) is chunk]
            columns = [_copied(column, left) for column in chunk.batch.columns]
            batch = pa.RecordBatch.from_arrays(columns, schema=chunk.batch.schema)
            chunk.replace(batch, [chunk.row_ids[index] for index in left])
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
        if batch is not None and chunk.num_left and chunk.batch is original:
            chunk.batch = batch
            chunk.where = "disk"
            self.disk_nbytes += chunk.nbytes
            self._in_memory.pop(id(chunk), None)


def gather(runs: Sequence[Run], column: str, arrow_type: pa.DataType) -> pa.ChunkedArray:
    """Return one column of rows, in order: slices of batches where rows lie side by side, copies where they do not."""
    return pa.chunked_array([_pick(run, column, arrow_type) for run in runs], arrow_type)


def _pick(run: Run, column: str, arrow_type: pa.DataType) -> pa.Array:
    position = -1 if run.batch is None else run.batch.schema.get_field_index(column)
    if run.batch is None or position < 0:
        return pa.nulls(len(run.indices), arrow_type)
    values = run.batch.column(position)
    if isinstance(run.indices, range):
        return values.slice(run.indices.start, len(run.indices))
    return _copied(values, run.indices)


def _copied(values: pa.Array, indices: Sequence[int]) -> pa.Array:
    """Return rows of an array in a copy of their own.

    `take` goes through the values of a list one by one, with an index for each (pyarrow 26): for long lists, up to
    fifty times what it costs to copy them row by row.
    """
    is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
    if is_list and len(values.values) >= LONG_LIST * len(values):
        return pa.concat_arrays([values.slice(index, 1) for index in indices])
    return values.take(pa.array(indices, pa.int64()))


def choose(runs: Sequence[Run], places: Sequence[int]) -> list[Run]:
    """Return the rows of runs at `places`, counted over all runs."""
    rows = [(run.batch, index) for run in runs for index in run.indices]
    chosen: list[Run] = []
    for batch, same in groupby([rows[place] for place in places], key=itemgetter(0)):
        indices = [index for _, index in same]
        chosen.append(Run(batch, _as_range(indices) or indices))
    return chosen


def cut(table: pa.Table, target_bytes: int = TARGET_BATCH_BYTES) -> pa.Table:
    """Return the same rows in batches of about 2 MB; many small pieces are joined, few large ones are not copied.

    Rows that were put together stay together: what was cut so on its way in is not cut again on its way out.
    """
    table = joined(table)
    # Never less than nbytes, and found without a look at the offsets.
    if table.get_total_buffer_size() <= target_bytes:
        return table
    batches = table.to_batches()
    pieces = [piece for batch in batches for piece in _pieces(batch, target_bytes)]
    return table if len(pieces) == len(batches) else pa.Table.from_batches(pieces, table.schema)


def _pieces(batch: pa.RecordBatch, target_bytes: int) -> list[pa.RecordBatch]:
    """Cut a batch that is over one and a half times as large as wanted into equal pieces of at least a row."""
    num_pieces = min(batch.num_rows, round(batch.nbytes / target_bytes))
    if num_pieces <= 1:
        return [batch]
    ends = [batch.num_rows * number // num_pieces for number in range(num_pieces + 1)]
    return [batch.slice(start, end - start) for start, end in pairwise(ends)]


def joined(table: pa.Table) -> pa.Table:
    """Return the same rows in fewer pieces if these are small and many; large ones are not copied."""
    num_pieces = max((column.num_chunks for column in table.columns), default=0)
    if num_pieces <= 1:
        return table
    most_bytes = min(num_pieces * COMBINE_BELOW_BYTES, MAX_COMBINE_BYTES)
    # What the buffers hold is never less than nbytes, and is found without a look at the offsets.
    is_small = table.get_total_buffer_size() < most_bytes or table.nbytes < most_bytes
    return table.combine_chunks() if is_small else table
