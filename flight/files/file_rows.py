"""Rows of a file as batches that fit a table, and tables as files. It knows no server.

Reads JSON lines, Parquet and Arrow IPC files; writes Parquet and Arrow IPC files that pandas and polars read without
any code of ours. Types become the table's own only where nothing is lost (`flight.files.json_values` for JSON,
`flight.files.casts` for the others); what does not fit is refused with its line or row and its column.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from flight.errors import FlightQueueError, InvalidRequestError, SchemaMismatchError
from flight.files.casts import LossError, fit
from flight.files.json_values import Convert, MisfitError, converter, to_array
from flight.schema import Column, TableSpec

JSON_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")
BATCH_BYTES = 4 << 20
"""About how much of a file becomes one batch."""

MAX_LINE_BYTES = 256 << 20
_GIVEN_BY_PRODUCER = ("uid", "group_id")
_GIVEN_BY_SERVER = ("row_id", "attempt")
"""Columns of an exported file that a put leaves out."""


@dataclass(frozen=True, kw_only=True)
class FileRows:
    """The rows of one file, for one table.

    name: what errors call the file.
    uid_prefix: what the uids of rows without one begin with, their line or row follows; None if all rows have one.
    writer: whose columns are put; those of the others are left out. Empty: all.
    round_floats: let wide floats of a typed file lose digits in narrower columns.

    A row delivers the parts (columns of one writer) of which it has a value; the others stay open.
    """

    path: Path
    name: str
    spec: TableSpec
    uid_prefix: str | None
    writer: str = ""
    round_floats: bool = False

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows in order, each batch with the columns that its rows have.

        Raises:
            SchemaMismatchError: a value or a column does not fit; the message names line or row, and column.
            InvalidRequestError: the file cannot be read.
        """
        suffix = self.path.suffix.lower()
        try:
            if suffix in JSON_SUFFIXES:
                with self.path.open("rb") as file:
                    yield from self._json_batches(file)
            elif suffix in PARQUET_SUFFIXES:
                yield from self._typed_batches(_parquet_batches(self.path))
            elif suffix in ARROW_SUFFIXES:
                yield from self._typed_batches(_arrow_batches(self.path))
            else:
                raise InvalidRequestError(_wrong_suffix(self.path, (*JSON_SUFFIXES, *_TYPED_SUFFIXES)))
        except FlightQueueError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise InvalidRequestError(f"{self.name}: file must be readable, got: {error}") from error

    # ---- JSON lines -------------------------------------------------------------------------------------------

    def _json_batches(self, file: BinaryIO) -> Iterator[pa.RecordBatch]:
        rows: list[dict[str, Any]] = []
        writers: frozenset[str] = frozenset()
        num_bytes = 0
        converts = {column.name: converter(column.type) for column in self.spec.columns}
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            row, delivered = self._json_row(number, line, converts)
            if rows and (writers != delivered or num_bytes + len(line) > BATCH_BYTES):
                yield self._json_batch(rows, writers)
                rows, num_bytes = [], 0
            writers = delivered
            rows.append(row)
            num_bytes += len(line)
        if rows:
            yield self._json_batch(rows, writers)

    def _json_row(
        self, number: int, line: bytes, converts: dict[str, Convert | None]
    ) -> tuple[dict[str, Any], frozenset[str]]:
        """Return the values of a line and the writers whose parts it delivers."""
        place = f"{self.name}:{number}"
        if len(line) > MAX_LINE_BYTES:
            raise InvalidRequestError(
                f"{place}: line must be at most {MAX_LINE_BYTES} bytes, got {len(line)}"
            )
        try:
            given = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{place}: line must be one JSON object, got: {error}") from None
        if not isinstance(given, dict):
            raise InvalidRequestError(f"{place}: line must be one JSON object, got {_short(given)}")
        row: dict[str, Any] = {}
        for name, value in given.items():
            if name in _GIVEN_BY_SERVER:
                continue
            if name in _GIVEN_BY_PRODUCER:
                if value is not None and not isinstance(value, str):
                    self._fault(place, name, "text", value)
                row[name] = value
                continue
            column = self._column(place, name)
            if self._is_wanted(column):
                row[name] = self._json_value(place, column, converts[name], value)
        delivered = self._delivered({name: value is not None for name, value in row.items()})
        for column in self.spec.columns:
            if column.writer in delivered and not column.nullable and row.get(column.name) is None:
                got = "null" if column.name in row else "no such key"
                raise SchemaMismatchError(
                    f"{place}: column {column.name!r} must be {column.type}, not null, got {got}"
                )
        row["uid"] = row.get("uid") or self._uid(place, number)
        return row, delivered

    def _json_value(self, place: str, column: Column, convert: Convert | None, value: Any) -> Any:
        if convert is None:
            raise SchemaMismatchError(
                f"{place}: column {column.name!r} must be of a type that JSON can hold, got {column.type}; "
                "put it from a Parquet or Arrow file"
            )
        try:
            return None if value is None else convert(value)
        except MisfitError as misfit:
            rule = f"{column.type}, {misfit.rule}" if not misfit.path else misfit.rule
            return self._fault(place, column.name + misfit.path, rule, misfit.value)

    def _json_batch(self, rows: Sequence[dict[str, Any]], writers: frozenset[str]) -> pa.RecordBatch:
        arrays = {"uid": pa.array([row["uid"] for row in rows], pa.string())}
        if any(row.get("group_id") for row in rows):
            arrays["group_id"] = pa.array([row.get("group_id") for row in rows], pa.string())
        for column in self.spec.columns:
            if column.writer in writers and any(column.name in row for row in rows):
                arrays[column.name] = to_array([row.get(column.name) for row in rows], column.type)
        return pa.RecordBatch.from_pydict(arrays)

    # ---- typed files ------------------------------------------------------------------------------------------

    def _typed_batches(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        num_before = 0
        for batch in batches:
            arrays = self._typed_arrays(batch, num_before)
            for first, last, writers in self._runs(arrays, batch.num_rows):
                rows = {
                    name: array.slice(first, last - first)
                    for name, array in arrays.items()
                    if name in _GIVEN_BY_PRODUCER or self.spec.columns_by_name[name].writer in writers
                }
                self._refuse_nulls(rows, num_before + first)
                yield pa.RecordBatch.from_pydict(rows)
            num_before += batch.num_rows

    def _typed_arrays(self, batch: pa.RecordBatch, num_before: int) -> dict[str, pa.Array]:
        """Return the wanted columns of a batch as the types that the table has."""
        arrays: dict[str, pa.Array] = {}
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            if name in _GIVEN_BY_SERVER:
                continue
            column = None if name in _GIVEN_BY_PRODUCER else self._column(self.name, name)
            if column is not None and not self._is_wanted(column):
                continue
            if name in arrays:
                raise SchemaMismatchError(f"{self.name}: column {name!r} must be there once, got it twice")
            arrow_type = pa.string() if column is None else column.type
            try:
                arrays[name] = fit(array, arrow_type, round_floats=self.round_floats)
            except LossError as loss:
                where = self.name if loss.row is None else f"{self.name} row {num_before + loss.row + 1}"
                raise SchemaMismatchError(
                    f"{where}: column {name!r} must be {arrow_type} or become it without loss, got {loss.got}"
                    + (f"; {loss.way_out}" if loss.way_out else "")
                ) from None
        if "uid" not in arrays:
            numbers = range(num_before + 1, num_before + batch.num_rows + 1)
            uids = [self._uid(f"{self.name} row {number}", number) for number in numbers]
            arrays = {"uid": pa.array(uids, pa.string()), **arrays}
        return arrays

    def _runs(self, arrays: dict[str, pa.Array], num_rows: int) -> Iterator[tuple[int, int, frozenset[str]]]:
        """Yield the runs of rows that deliver the same parts: first row, row after the last, writers."""
        present = {name: array.is_valid().to_pylist() for name, array in arrays.items()}
        first = 0
        writers: frozenset[str] = frozenset()
        for row in range(num_rows):
            delivered = self._delivered({name: values[row] for name, values in present.items()})
            if row > first and delivered != writers:
                yield first, row, writers
                first = row
            writers = delivered
        if num_rows:
            yield first, num_rows, writers

    def _refuse_nulls(self, arrays: dict[str, pa.Array], num_before: int) -> None:
        for name, array in arrays.items():
            must_be = name == "uid" or (
                name not in _GIVEN_BY_PRODUCER and not self.spec.columns_by_name[name].nullable
            )
            if must_be and array.null_count:
                row = num_before + array.is_null().index(True).as_py() + 1
                self._fault(f"{self.name} row {row}", name, f"{array.type}, not null", None)

    # ---- parts ------------------------------------------------------------------------------------------------

    def _is_wanted(self, column: Column) -> bool:
        return not self.writer or column.writer in ("", self.writer)

    def _delivered(self, has_value: dict[str, bool]) -> frozenset[str]:
        """Return the writers whose parts a row delivers, given which columns it names and which have values."""
        named = [column for column in self.spec.columns if column.name in has_value]
        needed = {column.writer for column in self.spec.columns if not column.nullable}
        delivered = frozenset(
            column.writer for column in named if has_value[column.name] or column.writer not in needed
        )
        return delivered or frozenset(column.writer for column in named)

    def _uid(self, place: str, number: int) -> str:
        if self.uid_prefix is None:
            raise SchemaMismatchError(
                f"{place}: column 'uid' must be there, got none; give the rows uids, or a --uid-prefix"
            )
        return f"{self.uid_prefix}:{number}"

    # ---- faults -----------------------------------------------------------------------------------------------

    def _column(self, place: str, name: str) -> Column:
        column = self.spec.columns_by_name.get(name)
        if column is None:
            nearest = difflib.get_close_matches(name, self.spec.columns_by_name, n=1, cutoff=0.5)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise SchemaMismatchError(
                f"{place}: column must be one of {[*_GIVEN_BY_PRODUCER, *self.spec.columns_by_name]}, "
                f"got {name!r}{hint}"
            )
        return column

    def _fault(self, place: str, name: str, rule: str, value: Any) -> NoReturn:
        raise SchemaMismatchError(f"{place}: column {name!r} must be {rule}, got {_short(value)}")


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table as Parquet or Arrow IPC file, by suffix; the file is whole or not there.

    Raises:
        InvalidRequestError: the suffix is none of these, or the file cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in _TYPED_SUFFIXES:
        raise InvalidRequestError(_wrong_suffix(path, _TYPED_SUFFIXES))
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if suffix in PARQUET_SUFFIXES:
            pq.write_table(table, draft, compression="zstd")
        else:
            with pa.OSFile(str(draft), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
        draft.replace(path)
    except (pa.ArrowException, OSError) as error:
        raise InvalidRequestError(f"{path}: file must be writable, got: {error}") from error
    finally:
        draft.unlink(missing_ok=True)


_TYPED_SUFFIXES = (*PARQUET_SUFFIXES, *ARROW_SUFFIXES)


def check_suffix(path: Path) -> None:
    """Raise unless `write_table` could write a file of this name."""
    if path.suffix.lower() not in _TYPED_SUFFIXES:
        raise InvalidRequestError(_wrong_suffix(path, _TYPED_SUFFIXES))


def _wrong_suffix(path: Path, allowed: Sequence[str]) -> str:
    return f"{path}: file must end in one of {', '.join(allowed)}, got {path.suffix or 'no suffix'!r}"


def _parquet_batches(path: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        notes = file.metadata
        num_bytes = sum(notes.row_group(index).total_byte_size for index in range(notes.num_row_groups))
        rows = max(1, min(65_536, notes.num_rows * BATCH_BYTES // max(num_bytes, 1)))
        yield from file.iter_batches(batch_size=rows)


def _arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            with pa.ipc.open_file(source) as reader:
                yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            source.seek(0)
            with pa.ipc.open_stream(source) as stream:
                yield from stream


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else f"{text[:60]}... ({len(text)} characters)"
