"""Directories that the `datasets` library wrote with `save_to_disk`, read by pyarrow alone.

`state.json` names the Arrow stream files in order. They are mapped into memory: opening reads the batches' headers, and
a row the pages that it lies on. Row order is that of the directory; `save_to_disk` has applied any selection before.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa

from relax.data.errors import ManifestError
from relax.data.sources.typed import chosen_columns, class_labels, plain_row


class ArrowRows:
    """The rows of one split on disk.

    Args:
        directory: Directory with state.json.
        columns: The only columns that are read, where the files have them.

    Raises:
        ManifestError: state.json or a file that it names is missing or damaged, or there is no row.
    """

    def __init__(self, directory: Path, columns: Sequence[str]) -> None:
        self.base_dir = directory
        self._names: list[str] = []
        self._batches: list[pa.RecordBatch] = []
        self._at_in_file: list[int] = []
        schema = None
        for name in _data_files(directory):
            schema = self._map(directory / name)
        self._ends = list(accumulate(each.num_rows for each in self._batches))
        if schema is None or not len(self):
            raise ManifestError(f"{directory}: must have a row, got an empty data set")
        self.column_names: tuple[str, ...] | None = tuple(schema.names)
        self._columns, self._labels = chosen_columns(schema, columns), class_labels(schema)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def place(self, index: int) -> str:
        """Return file and row in the file, counted from 0."""
        batch, at = self._find(index)
        return f"{self._names[batch]}[{self._at_in_file[batch] + at}]"

    def read(self, index: int) -> dict[str, Any]:
        """Return row `index`.

        Raises:
            LineError: its values are damaged.
        """
        batch, at = self._find(index)
        return plain_row(self._batches[batch].select(self._columns), at, self._labels)

    def _find(self, index: int) -> tuple[int, int]:
        batch = bisect_right(self._ends, index)
        return batch, index - (self._ends[batch - 1] if batch else 0)

    def _map(self, path: Path) -> pa.Schema:
        num_rows = 0
        try:
            with pa.ipc.open_stream(pa.memory_map(str(path))) as stream:
                for batch in stream:
                    self._names.append(path.name)
                    self._batches.append(batch)
                    self._at_in_file.append(num_rows)
                    num_rows += batch.num_rows
                return stream.schema
        except (OSError, pa.ArrowException) as error:
            raise ManifestError(f"{path}: must be an Arrow stream file, got: {error}") from error


def _data_files(directory: Path) -> list[str]:
    path = directory / "state.json"
    try:
        files = [each["filename"] for each in json.loads(path.read_text(encoding="utf-8"))["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ManifestError(f"{path}: must list _data_files, got: {type(error).__name__} {error}") from error
    strange = [each for each in files if not isinstance(each, str) or Path(each).name != each]
    if strange:
        raise ManifestError(f"{path}: _data_files must be names in the directory, got {strange}")
    return files
