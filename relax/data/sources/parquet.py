"""Parquet files. A row's group is read and kept; a group too large to keep is streamed up to the row.

Random access to Parquet costs a row group, so groups should be small where rows hold media: 100 rows is what the
`datasets` library writes for pictures. The groups last used are kept, up to `MAX_KEPT_BYTES` a source.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from relax.data.errors import LineError, ManifestError
from relax.data.sources.typed import chosen_columns, class_labels, plain_row

MAX_KEPT_BYTES = 128 << 20
"""Decoded row groups that are kept; a single larger one is streamed."""

STREAMED_ROWS = 32
MAX_OPEN_FILES = 16


class _Group(NamedTuple):
    """A row group: its file, its number there, its first row in the file, and its decoded size in bytes."""

    file: int
    number: int
    first_row: int
    num_bytes: int


class ParquetRows:
    """The rows of one or several Parquet files with the same columns.

    Args:
        paths: The files, in order.
        columns: The only columns that are read, where the files have them.
        base_dir: Where relative paths of media count from.

    Raises:
        ManifestError: a file is missing, damaged or has other columns, or there is no row.
    """

    def __init__(self, paths: Sequence[Path], columns: Sequence[str], *, base_dir: Path) -> None:
        self.base_dir = base_dir
        self._paths = list(paths)
        self._files: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._kept: OrderedDict[_Group, pa.Table] = OrderedDict()
        self._groups: list[_Group] = []
        try:
            schema = self._file(0).schema_arrow
            self._columns, self._labels = chosen_columns(schema, columns), class_labels(schema)
            self.column_names: tuple[str, ...] | None = tuple(schema.names)
            sizes = [size for number in range(len(self._paths)) for size in self._add(number, schema)]
        except (OSError, pa.ArrowException) as error:
            raise ManifestError(f"{self._paths[0]}: must be a Parquet file, got: {error}") from error
        self._ends = list(accumulate(sizes))
        if not len(self):
            raise ManifestError(f"{self._paths[0]}: must have a row, got an empty file")

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def place(self, index: int) -> str:
        """Return file and row in the file, counted from 0."""
        group, at = self._find(index)
        return f"{self._paths[group.file].name}[{group.first_row + at}]"

    def read(self, index: int) -> dict[str, Any]:
        """Return row `index`.

        Raises:
            LineError: the row's group is damaged.
        """
        group, at = self._find(index)
        try:
            if group.num_bytes > MAX_KEPT_BYTES:
                return self._stream(group, at)
            return plain_row(self._table(group), at, self._labels)
        except (OSError, pa.ArrowException) as error:
            raise LineError(f"row group {group.number} must be readable, got {error}") from error

    def _find(self, index: int) -> tuple[_Group, int]:
        number = bisect_right(self._ends, index)
        return self._groups[number], index - (self._ends[number - 1] if number else 0)

    def _add(self, number: int, schema: pa.Schema) -> list[int]:
        """Note the row groups of a file and return their numbers of rows."""
        file = self._file(number)
        if not file.schema_arrow.equals(schema):
            raise ManifestError(
                f"{self._paths[number]}: must have the columns of {self._paths[0].name}, got "
                f"{str(file.schema_arrow).splitlines()}"
            )
        sizes: list[int] = []
        for each in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(each)
            parts = [group.column(leaf) for leaf in range(group.num_columns)]
            wanted = [part for part in parts if part.path_in_schema.split(".")[0] in self._columns]
            num_bytes = sum(part.total_uncompressed_size for part in wanted)
            self._groups.append(_Group(number, each, sum(sizes), num_bytes))
            sizes.append(group.num_rows)
        return sizes

    def _file(self, number: int) -> pq.ParquetFile:
        file = self._files.get(number)
        if file is None:
            file = pq.ParquetFile(self._paths[number])
            self._files[number] = file
            if len(self._files) > MAX_OPEN_FILES:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(number)
        return file

    def _table(self, group: _Group) -> pa.Table:
        table = self._kept.get(group)
        if table is None:
            table = self._file(group.file).read_row_group(
                group.number, columns=self._columns, use_threads=False
            )
            self._kept[group] = table
            while sum(each.nbytes for each in self._kept.values()) > MAX_KEPT_BYTES and len(self._kept) > 1:
                self._kept.popitem(last=False)
        self._kept.move_to_end(group)
        return table

    def _stream(self, group: _Group, at: int) -> dict[str, Any]:
        batches = self._file(group.file).iter_batches(
            batch_size=STREAMED_ROWS, row_groups=[group.number], columns=self._columns, use_threads=False
        )
        for batch in batches:
            if at < batch.num_rows:
                return plain_row(batch, at, self._labels)
            at -= batch.num_rows
        raise LineError(f"row group {group.number} must hold the rows that its header promises, got fewer")
