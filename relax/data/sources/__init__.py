"""Files of rows by format, each with random access and bounded memory. Rows are given as they stand.

    jsonl.py    JSON Lines: 16 bytes a row are kept, a line is read when it is asked for
    parquet.py  Parquet files: the row groups last used are kept, a large one is streamed
    arrow.py    directories that the `datasets` library wrote with `save_to_disk`: mapped, not read

The path decides the format: `.jsonl` and `.ndjson`, `.parquet`, a directory with `state.json`, a directory of
`.parquet` files. How a row is understood is the layout's matter (`relax.data.layouts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from relax.data.errors import ManifestError
from relax.data.sources.arrow import ArrowRows
from relax.data.sources.jsonl import JsonRows
from relax.data.sources.parquet import ParquetRows

JSON_SUFFIXES = (".jsonl", ".ndjson")
FORMATS = "a .jsonl, .ndjson or .parquet file, a directory of .parquet files, or one that save_to_disk wrote"


class Rows(Protocol):
    """Random access to the rows of one source."""

    base_dir: Path
    """Where relative paths of media count from."""
    column_names: tuple[str, ...] | None
    """The columns of every row; None: each row has its own keys."""

    def __len__(self) -> int: ...

    def place(self, index: int) -> str:
        """Return where row `index` stands, for messages."""
        ...

    def read(self, index: int) -> Mapping[str, Any]:
        """Return row `index` as plain values.

        Raises:
            LineError: the row cannot be read.
        """
        ...


def open_rows(path: str | Path, columns: Sequence[str]) -> Rows:
    """Open a source; of a file with typed columns only `columns` are ever read.

    Raises:
        ManifestError: there is none, it has no row, it is damaged, or its format is none of ours.
    """
    place = Path(path)
    if place.is_dir():
        if (place / "dataset_dict.json").is_file():
            splits = sorted(each.parent.name for each in place.glob("*/state.json"))
            raise ManifestError(
                f"{place}: must be one split, got a directory of {splits}; name {place}/SPLIT"
            )
        if (place / "state.json").is_file():
            return ArrowRows(place, columns)
        shards = sorted(place.glob("*.parquet"))
        if not shards:
            raise ManifestError(f"{place}: must be {FORMATS}, got a directory with neither")
        return ParquetRows(shards, columns, base_dir=place)
    if place.suffix == ".parquet":
        return ParquetRows([place], columns, base_dir=base_dir_of(place))
    if place.suffix in JSON_SUFFIXES:
        return JsonRows(place)
    raise ManifestError(f"{place}: must be {FORMATS}, got suffix {place.suffix!r}")


def base_dir_of(path: str | Path) -> Path:
    """Return where relative paths of media count from: a directory itself, else the file's."""
    return Path(path) if Path(path).is_dir() else Path(path).parent


def check_there(path: str | Path) -> None:
    """Look whether a source is there, and whether a text file has a row, without reading it.

    Raises:
        ManifestError: there is none, or it is empty.
    """
    place = Path(path)
    if not place.exists():
        raise ManifestError(f"must be {FORMATS}, got '{path}', where there is none")
    if place.suffix in JSON_SUFFIXES and place.is_file():
        with place.open("rb") as file:
            if not any(line.strip() for line in file):
                raise ManifestError(
                    f"must have a row, got '{path}', which is empty; write one JSON object a line"
                )
