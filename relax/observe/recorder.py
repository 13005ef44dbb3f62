"""The recorder: what was trained on, one Parquet file for each policy version. It opens no socket.

Life cycle: `write` puts each batch on disk at once, in a hidden directory beside the records. When rows of a newer
version come, or on `close`, the batches of a version become `<directory>/000012.parquet`: written under another
name, then renamed, so that a reader sees whole files only. A recorder that was killed is continued by the next one
on the same directory: batches left behind are taken up, and rows delivered twice are kept once (by `uid`). When the
run goes back to a checkpoint, what was trained after it is removed: it is trained on anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from relax.errors import ServiceError, WiringError
from relax.observe.natural import natural_table, write_parquet

VERSION = "trained_policy_version"


class RolloutRecorder:
    """Writes recorded rollouts into `directory`. One recorder a directory; not for several threads.

    After `write` has returned, its rows survive the death of the process: acknowledge them then.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._open_directory = self.directory.with_name(f".{self.directory.name}.open")
        self._open_directory.mkdir(exist_ok=True)
        self._closed = False
        self.num_rows = 0
        """Rows given to `write` so far."""
        self.num_duplicates = 0
        """Rows that were in the record already, by uid, when their file was made."""
        self._next_batch = 0
        self._batches: dict[int, list[Path]] = {}
        self._take_up_what_was_left()

    def write(self, table: pa.Table) -> int:
        """Record rows of table `rollouts`, all columns as they are; returns their number once they are on disk.

        Rows of one version may come in several batches; a row of a finished version is added to its file.

        Raises:
            ServiceError: the recorder is closed.
            WiringError: `trained_policy_version` is missing or null, or routed experts have another type.
        """
        if self._closed:
            raise ServiceError(
                f"recorder {self.directory}: it must be open to write, got closed; make a new one"
            )
        for version, rows in _by_version(natural_table(table)):
            self._keep(version, rows)
        self.num_rows += len(table)
        for version in sorted(self._batches)[:-1]:
            self._finish(version)
        return len(table)

    def close(self) -> None:
        """Finish every version that is open; harmless when repeated."""
        if self._closed:
            return
        for version in sorted(self._batches):
            self._finish(version)
        self._closed = True
        self._open_directory.rmdir()

    def forget_from(self, version: int) -> int:
        """Remove what was recorded under `version` and later ones, for the run has gone back; return how many files."""
        gone = [path for path in self.directory.glob("*.parquet") if int(path.stem) >= version]
        for later in [each for each in self._batches if each >= version]:
            gone += self._batches.pop(later)
        for path in gone:
            path.unlink()
        return len(gone)

    def __enter__(self) -> RolloutRecorder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def path_of(self, version: int) -> Path:
        """Return the file of a policy version; it exists once the version is finished."""
        return self.directory / f"{version:06d}.parquet"

    def _take_up_what_was_left(self) -> None:
        for leftover in sorted(self._open_directory.iterdir()):
            if leftover.suffix != ".arrow":
                leftover.unlink()
                continue
            version, batch = (int(part) for part in leftover.stem.split("-"))
            self._batches.setdefault(version, []).append(leftover)
            self._next_batch = max(self._next_batch, batch + 1)

    def _keep(self, version: int, rows: pa.Table) -> None:
        final = self._open_directory / f"{version:06d}-{self._next_batch:09d}.arrow"
        unfinished = final.with_suffix(".unfinished")
        with unfinished.open("wb") as sink:
            with pa.ipc.new_file(sink, rows.schema) as writer:
                writer.write_table(rows)
            sink.flush()
            os.fsync(sink.fileno())
        unfinished.replace(final)
        self._next_batch += 1
        self._batches.setdefault(version, []).append(final)

    def _finish(self, version: int) -> None:
        batches = self._batches[version]
        record = self.path_of(version)
        schemas = [part.schema for part in _read_batches(batches)]
        parts = _read_batches(batches)
        if record.exists():
            schemas.insert(0, pq.read_schema(record))
            parts = _chain(_read_record(record), parts)
        schema = _unify(schemas, record)
        write_parquet(self._once(parts), schema, record, scratch=self._open_directory)
        for batch in batches:
            batch.unlink()
        del self._batches[version]

    def _once(self, parts: Iterator[pa.Table]) -> Iterator[pa.Table]:
        seen: set[str] = set()
        for part in parts:
            if "uid" not in part.column_names:
                yield part
                continue
            fresh = []
            for uid in part["uid"].to_pylist():
                fresh.append(uid not in seen)
                seen.add(uid)
            self.num_duplicates += fresh.count(False)
            yield part if all(fresh) else part.filter(pa.array(fresh))


def read_routed_experts(row: Mapping[str, Any]) -> np.ndarray | None:
    """Return the experts of one recorded row, None where none were recorded.

    Shapes: uint8 or uint16 [num_tokens - 1, num_layers, top_k].
    """
    data = row["routed_experts"]
    if data is None:
        return None
    shape = [int(size) for size in row["routed_experts_shape"]]
    num_values = int(np.prod(shape))
    itemsize = len(data) // num_values if num_values else 1
    return np.frombuffer(data, f"<u{itemsize}").reshape(shape)


def write_table(table: pa.Table, path: str | os.PathLike[str]) -> int:
    """Write one table in natural types to `path`, whole or not at all; returns the number of rows."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    recorded = natural_table(table)
    return write_parquet(iter([recorded]), recorded.schema, target)


def read_rollouts(directory: str | os.PathLike[str], columns: Iterable[str] | None = None) -> pa.Table:
    """Return the records in `directory`, oldest version first; without any, a table of no columns."""
    paths = sorted(Path(directory).glob("*.parquet"))
    if not paths:
        return pa.table({})
    wanted = None if columns is None else set(columns)
    parts = []
    for path in paths:
        names = pq.read_schema(path).names
        parts.append(
            pq.read_table(
                path, columns=[name for name in names if wanted is None or name in wanted], partitioning=None
            )
        )
    return pa.concat_tables(parts, promote_options="permissive")


def _by_version(table: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    if VERSION not in table.column_names:
        raise WiringError(
            f"recorder: table 'rollouts' must have column {VERSION!r}, got {table.column_names}; "
            "name it among the columns of consumer 'recorder'"
        )
    versions = table[VERSION]
    if versions.null_count:
        raise WiringError(
            f"recorder: column {VERSION!r} must be filled in every row, got {versions.null_count} nulls "
            f"in {len(table)} rows; record rows after the actor has written its columns"
        )
    for version in sorted(pc.unique(versions).to_pylist()):
        yield version, table.filter(pc.equal(versions, version))


def _read_batches(paths: Iterable[Path]) -> Iterator[pa.Table]:
    for path in paths:
        with pa.memory_map(str(path)) as source:
            yield pa.ipc.open_file(source).read_all()


def _read_record(path: Path) -> Iterator[pa.Table]:
    with pq.ParquetFile(path) as record:
        for group in range(record.num_row_groups):
            yield record.read_row_group(group)


def _chain(*parts: Iterator[pa.Table]) -> Iterator[pa.Table]:
    for part in parts:
        yield from part


def _unify(schemas: list[pa.Schema], record: Path) -> pa.Schema:
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise WiringError(
            f"recorder {record}: batches of one version must agree in their column types, got {error}; "
            "record each run into a directory of its own"
        ) from error
