"""Tables as the batches of a stream: one look at the size, nothing moved when it is one small batch already."""

from __future__ import annotations

import pyarrow as pa

from flight.data.store import TARGET_BATCH_BYTES, cut


def to_send(rows: pa.Table | pa.RecordBatch, num_bytes: int) -> list[pa.RecordBatch]:
    """Return rows of `num_bytes` as batches of about 2 MB, at least one; empty pieces are left out."""
    if num_bytes <= TARGET_BATCH_BYTES:
        found = [rows] if isinstance(rows, pa.RecordBatch) else rows.to_batches()
        if len(found) == 1:
            return found
    table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    return cut(table).to_batches() or [pa.RecordBatch.from_pylist([], schema=rows.schema)]


def size_of(rows: pa.Table | pa.RecordBatch, exact_from: int) -> int:
    """Return the bytes of rows; if the buffers that they lie in are smaller than `exact_from`, the bytes of these.

    To look at the offsets of each column, as `nbytes` does, takes a hundred times as long.
    """
    held_bytes = rows.get_total_buffer_size()
    return int(held_bytes if held_bytes < exact_from else rows.nbytes)
