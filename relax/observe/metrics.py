"""Metrics of a run: to TensorBoard event files, to Parquet, and to series in memory. It measures nothing itself.

Rows are long: (step, policy_version, role, name, value, time). While a run lasts, finished parts lie in
`<run_dir>/metrics/000000.parquet` and so on, each appearing whole; now and then, and on `close`, they are merged into
`<run_dir>/metrics.parquet`. `read_metrics` reads both at any time, also after a crash between the two. A row that
comes twice is kept once.

Names: `<group>/<what>_<unit>` or `<what>_<unit>`. The report knows one kind: `time/<part>_s`, the seconds that a role
spent in a part since its last row of that name.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from relax.durable import append_whole
from relax.errors import ServiceError, WiringError
from relax.observe.natural import write_parquet

TIME_PREFIX = "time/"
METRIC_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), metadata={"meaning": "optimizer step the value belongs to"}),
        pa.field("policy_version", pa.int64(), metadata={"meaning": "weights the value belongs to"}),
        pa.field("role", pa.string(), metadata={"meaning": "service that measured it"}),
        pa.field(
            "name", pa.string(), metadata={"meaning": "what was measured; its unit is the name's last word"}
        ),
        pa.field("value", pa.float64(), metadata={"meaning": "the value"}),
        pa.field(
            "time", pa.timestamp("us", tz="UTC"), metadata={"meaning": "when it was measured", "unit": "UTC"}
        ),
    ]
)
_NEXT_PART = b"next_part"
_PARTS_PER_MERGE = 64
_REMEMBERED_ROWS = 100_000
_Key = tuple[int, str, str, int, float]
_READ_ATTEMPTS = 5
_event_files = count()


class Point(NamedTuple):
    """One value of a series; `time_s` is seconds since 1970."""

    step: int
    policy_version: int
    value: float
    time_s: float


class SeriesStore:
    """The newest points of every (role, name) in memory, at most `max_points` each."""

    def __init__(self, max_points: int = 4096) -> None:
        self._max_points = max_points
        self._series: dict[tuple[str, str], deque[Point]] = {}

    def add(self, role: str, name: str, point: Point) -> None:
        self._series.setdefault((role, name), deque(maxlen=self._max_points)).append(point)

    def names(self) -> list[tuple[str, str]]:
        """Return every (role, name), sorted."""
        return sorted(self._series)

    def points(self, role: str, name: str) -> list[Point]:
        """Return the kept points, oldest first; empty when the series is unknown."""
        return list(self._series.get((role, name), ()))

    def forget(self, after_version: int, roles: Collection[str]) -> None:
        """Drop the points of those roles that belong to later policy versions."""
        for (role, _), points in self._series.items():
            if role in roles:
                kept = [point for point in points if point.policy_version <= after_version]
                points.clear()
                points.extend(kept)

    def last(self, role: str, name: str) -> Point | None:
        series = self._series.get((role, name))
        return series[-1] if series else None

    def mean(self, role: str, name: str, num_points: int) -> float | None:
        """Return the mean of the newest `num_points` values, None when there are none."""
        newest = list(self._series.get((role, name), ()))[-num_points:]
        return sum(point.value for point in newest) / len(newest) if newest else None


class MetricsWriter:
    """Takes metric rows and keeps them three ways. One writer a run directory; not for several threads.

    Args:
        run_dir: gets `tensorboard/`, `metrics/` and at the end `metrics.parquet`.
        rows_per_part: rows kept in memory before a part is written; `flush` writes one at any time.
        seconds_per_part: longest time that a row waits for its part, while rows come.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        rows_per_part: int = 4096,
        seconds_per_part: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.series = SeriesStore()
        self._rows_per_part, self._seconds_per_part, self._clock = rows_per_part, seconds_per_part, clock
        self._part_began_s = clock()
        self._parts = self.run_dir / "metrics"
        self._parts.mkdir(parents=True, exist_ok=True)
        kept = [int(path.stem) + 1 for path in self._parts.glob("*.parquet")]
        self._next_part = max([_merged_parts(self.run_dir), *kept])
        self._waiting: list[pa.Table] = []
        self._num_waiting = 0
        self._events = _EventFile(self.run_dir / "tensorboard")
        self._closed = False
        self._seen: OrderedDict[_Key, None] = OrderedDict()
        """The newest rows, by all that tells them apart."""

    def write(self, table: pa.Table) -> None:
        """Take rows with the columns of `METRIC_SCHEMA`; more columns are ignored.

        Raises:
            ServiceError: the writer is closed.
            WiringError: a column is missing.
        """
        if self._closed:
            raise ServiceError(f"metrics {self.run_dir}: the writer must be open to write, got closed")
        missing = sorted(set(METRIC_SCHEMA.names) - set(table.column_names))
        if missing:
            raise WiringError(
                f"metrics: a row must have columns {METRIC_SCHEMA.names}, got none of {missing}"
            )
        rows = self._new(table.select(METRIC_SCHEMA.names).cast(METRIC_SCHEMA))
        for row in rows.to_pylist():
            moment = row["time"].timestamp()
            self.series.add(
                row["role"], row["name"], Point(row["step"], row["policy_version"], row["value"], moment)
            )
            self._events.add(f"{row['role']}/{row['name']}", row["step"], row["value"], moment)
        self._waiting.append(rows)
        self._num_waiting += len(rows)
        if self._num_waiting >= self._rows_per_part:
            self.flush()
        self.flush_if_late()

    @property
    def is_closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._closed

    @property
    def is_flushed(self) -> bool:
        """Whether all that was taken is on disk."""
        return not self._num_waiting

    def flush_if_late(self) -> None:
        """Write a part if the oldest row has waited for long enough."""
        if self._clock() - self._part_began_s >= self._seconds_per_part:
            self.flush()

    def add(
        self,
        role: str,
        step: int,
        policy_version: int,
        values: Mapping[str, float],
        time_s: float | None = None,
    ) -> None:
        """Take the values that one role measured at one step; `time_s` is seconds since 1970, by default now."""
        self.write(metric_rows(role, step, policy_version, values, time_s))

    def go_back(self, policy_version: int, roles: Collection[str]) -> None:
        """Forget what those roles measured under later policy versions: the run has gone back to this one.

        What is on disk is remembered from here on, so that a row that is delivered again is kept once; TensorBoard is
        told that the later steps are void.
        """
        self.flush()
        later = (pc.field("policy_version") > policy_version) & pc.field("role").isin(sorted(roles))
        self._merge(lambda part: part.filter(~later))
        self.series.forget(policy_version, roles)
        self._seen.clear()
        for part in _stored(self.run_dir):
            self._new(part)
        self._events.void_after(policy_version)

    def take_up(self) -> None:
        """Have the series of what an earlier writer left on disk, too."""
        for part in _stored(self.run_dir):
            for row in part.to_pylist():
                point = Point(row["step"], row["policy_version"], row["value"], row["time"].timestamp())
                self.series.add(row["role"], row["name"], point)

    def _new(self, rows: pa.Table) -> pa.Table:
        """Return the rows that have not been here before."""
        columns = [rows["time"].cast(pa.int64()), *(rows[name] for name in ("role", "name", "step", "value"))]
        is_new = []
        for key in zip(*(column.to_pylist() for column in columns), strict=True):
            is_new.append(key not in self._seen)
            self._seen[key] = None
        while len(self._seen) > _REMEMBERED_ROWS:
            self._seen.popitem(last=False)
        return rows if all(is_new) else rows.filter(pa.array(is_new, pa.bool_()))

    def flush(self) -> None:
        """Put what was taken so far on disk."""
        self._events.flush()
        if self._num_waiting:
            path = self._parts / f"{self._next_part:06d}.parquet"
            write_parquet(iter(self._waiting), METRIC_SCHEMA, path, scratch=self.run_dir)
            self._next_part += 1
            self._waiting, self._num_waiting = [], 0
            if self._next_part % _PARTS_PER_MERGE == 0:
                self._merge()
        self._part_began_s = self._clock()

    def close(self) -> None:
        """Write all, merge the parts into `metrics.parquet` and remove them; harmless when repeated."""
        if self._closed:
            return
        self.flush()
        self._merge()
        self._parts.rmdir()
        self._closed = True

    def _merge(self, keep: Callable[[pa.Table], pa.Table] = lambda part: part) -> None:
        merged = METRIC_SCHEMA.with_metadata({_NEXT_PART: str(self._next_part).encode()})
        write_parquet(map(keep, _stored(self.run_dir)), merged, self.run_dir / "metrics.parquet")
        for part in self._parts.glob("*.parquet"):
            part.unlink()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def metric_rows(
    role: str, step: int, policy_version: int, values: Mapping[str, float], time_s: float | None = None
) -> pa.Table:
    """Return one row a value, in `METRIC_SCHEMA`; `time_s` is seconds since 1970, by default now."""
    moment = datetime.fromtimestamp(time.time() if time_s is None else time_s, tz=UTC)
    size = len(values)
    columns = {
        "step": [step] * size,
        "policy_version": [policy_version] * size,
        "role": [role] * size,
        "name": list(values),
        "value": [float(value) for value in values.values()],
        "time": [moment] * size,
    }
    return pa.table(columns, schema=METRIC_SCHEMA)


def read_metrics(run_dir: str | os.PathLike[str]) -> pa.Table:
    """Return all metric rows on disk, in the order they were written; also while the run lasts."""
    for _ in range(_READ_ATTEMPTS):
        before = _merged_parts(Path(run_dir))
        try:
            rows = pa.concat_tables([METRIC_SCHEMA.empty_table(), *_stored(Path(run_dir))])
        except FileNotFoundError:  # a part that was merged meanwhile
            continue
        if before == _merged_parts(Path(run_dir)):
            return rows
    raise ServiceError(
        f"metrics {run_dir}: files must stand still while they are read, got changes; read again"
    )


def _merged_parts(run_dir: Path) -> int:
    """Return how many parts `metrics.parquet` already holds."""
    merged = run_dir / "metrics.parquet"
    if not merged.exists():
        return 0
    return int((pq.read_schema(merged).metadata or {}).get(_NEXT_PART, b"0"))


def _stored(run_dir: Path) -> Iterator[pa.Table]:
    first_part = _merged_parts(run_dir)
    paths = [path for path in sorted((run_dir / "metrics").glob("*.parquet")) if int(path.stem) >= first_part]
    if (run_dir / "metrics.parquet").exists():
        paths.insert(0, run_dir / "metrics.parquet")
    for path in paths:
        with pq.ParquetFile(path) as stored:
            yield stored.read().replace_schema_metadata(None).cast(METRIC_SCHEMA)


class _EventFile:
    """One TensorBoard event file, written through TensorBoard's own framing; no thread, no TensorFlow, no torch."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_type, self._summary_type = Event, Summary
        directory.mkdir(parents=True, exist_ok=True)
        host = socket.gethostname()
        name = f"events.out.tfevents.{int(time.time()):010d}.{host}.{os.getpid()}.{next(_event_files)}"
        self._path = directory / name
        self._buffer = io.BytesIO()
        self._records = RecordWriter(self._buffer)
        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def add(self, tag: str, step: int, value: float, time_s: float) -> None:
        scalar = self._summary_type.Value(tag=tag, simple_value=value)
        summary = self._summary_type(value=[scalar])
        self._records.write(
            self._event_type(wall_time=time_s, step=step, summary=summary).SerializeToString()
        )

    def void_after(self, step: int) -> None:
        """Tell TensorBoard that what it has of later steps does not count."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        log = SessionLog(status=SessionLog.START)
        self._records.write(Event(wall_time=time.time(), step=step + 1, session_log=log).SerializeToString())
        self.flush()

    def flush(self) -> None:
        append_whole(self._path, self._buffer.getvalue())
        self._buffer.seek(0)
        self._buffer.truncate()
