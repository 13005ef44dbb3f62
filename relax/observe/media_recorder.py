"""The media of a run on disk: what the rows of table `media` held, each id once. It opens no socket.

`<directory>/000000.parquet` and so on, each whole or not there; `media_id` is what `media_ids` of a recorded rollout
names. Lists of bytes (patches) are stored as `binary`, because Parquet has no 8-bit integers.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from relax.observe.natural import natural_table, write_parquet

LEFT_OUT = ("row_id", "uid", "group_id", "attempt")


class MediaRecorder:
    """Writes one file for each batch that holds an id not seen before; a new one goes on where the last one ended."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._seen: set[str] = set()
        paths = sorted(self.directory.glob("*.parquet"))
        for path in paths:
            self._seen.update(pq.read_table(path, columns=["media_id"])["media_id"].to_pylist())
        self._next_file = int(paths[-1].stem) + 1 if paths else 0

    def write(self, rows: pa.Table) -> int:
        """Record rows of table `media`; return how many were new. They survive the process once this has returned."""
        fresh = []
        for media_id in rows["uid"].to_pylist():
            fresh.append(media_id not in self._seen)
            self._seen.add(media_id)
        if not any(fresh):
            return 0
        chosen = rows.filter(pa.array(fresh))
        columns = {"media_id": chosen["uid"]} | {
            name: _as_bytes(chosen[name]) for name in chosen.column_names if name not in LEFT_OUT
        }
        recorded = natural_table(pa.table(columns))
        path = self.directory / f"{self._next_file:06d}.parquet"
        write_parquet(iter([recorded]), recorded.schema, path)
        self._next_file += 1
        return recorded.num_rows


def _as_bytes(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return lists of uint8 as binary over the same buffers; other columns as they are."""
    if not (pa.types.is_list(column.type) and column.type.value_type == pa.uint8()):
        return column
    pieces = []
    for chunk in column.chunks:
        validity, offsets, *_ = chunk.buffers()
        values = chunk.values
        data = values.buffers()[1]
        if data is not None and values.offset:
            data = data.slice(values.offset)
        pieces.append(
            pa.Array.from_buffers(
                pa.binary(), len(chunk), [validity, offsets, data], chunk.null_count, chunk.offset
            )
        )
    return pa.chunked_array(pieces, pa.binary())
