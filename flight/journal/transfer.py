"""A queue as one file: made from a server or from a journal's directory, and made into a directory again.

A snapshot is a checkpoint with the rows inside: HEADER, then SCHEMA and ROWS, then what a state file ends with. Leases
are in it and end when a server starts on what it was restored to, as after a crash.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from flight import messages as m
from flight.broker import Broker
from flight.broker.capturing import CapturedTable
from flight.data.store import TARGET_BATCH_BYTES, Run
from flight.errors import InvalidRequestError, JournalDamagedError
from flight.journal import records as r
from flight.journal.checkpoint import end_frames, read_checkpoint, state_frames
from flight.journal.directory import JournalDirectory
from flight.journal.extents import Extent, ExtentIndex, TableKey, extent_of
from flight.journal.format import Frame, Kind, frame
from flight.journal.recovery import recover
from flight.journal.replay import ReplayingBroker, standing_broker
from flight.journal.survey import map_file

MAX_ROWS_A_FRAME = 4096


def snapshot_frames(broker: Broker, *, journal: str = "", seq: int = 0) -> Iterator[list[Any]]:
    """Yield the buffers of a snapshot of all tables as they are now, frame by frame."""
    head = r.FileHead(
        role="snapshot",
        journal=journal,
        number=0,
        seq=seq,
        clock_offset_s=(broker.clock_offset_s or 0.0)
        if isinstance(broker, ReplayingBroker)
        else time.time() - broker.clock(),
    )
    captured = broker.capture()
    first = frame(Kind.HEADER, seq, seq, r.encode(head))
    yield first
    place = sum(map(len, first))
    schemas: set[int] = set()
    extents: dict[TableKey, list[Extent]] = defaultdict(list)
    for table in captured:
        for put, batch in _rows(table):
            if put.schema not in schemas:
                schemas.add(put.schema)
                parts = frame(Kind.SCHEMA, seq, seq, r.encode(put.schema), batch.schema.serialize())
                place += sum(map(len, parts))
                yield parts
            parts = frame(Kind.ROWS, seq, seq, r.encode(put), batch.serialize())
            num_bytes = sum(map(len, parts))
            row_ids = np.frombuffer(put.row_ids, np.int64)
            extent = Extent(0, "snapshot", place, num_bytes, seq, put, row_ids)
            extents[put.table, 0].append(extent)
            place += num_bytes
            yield parts
    yield from end_frames(seq, [_record(table) for table in captured], extents)


def _record(table: CapturedTable) -> r.TableRecord:
    return r.TableRecord(
        created=0,
        definitions=[m.from_spec(spec) for spec in table.definitions],
        state=table.state,
        gate=table.gate,
    )


def _rows(table: CapturedTable) -> Iterator[tuple[r.Put, pa.RecordBatch]]:
    """Yield the values of a table, part by part, in batches of about 2 MB: rows that lie in one batch together."""
    rows = table.state.rows
    for writer, (part, runs) in table.places.items():
        for batch, chosen in _pieces(runs):
            columns = {
                "uid": pa.array(rows.uids[chosen], pa.string()),
                "group_id": pa.array(rows.group_ids[chosen], pa.string()),
            } | dict(zip(batch.schema.names, batch.columns, strict=True))
            whole = pa.record_batch(columns)
            put = r.Put(
                table=table.definitions[-1].name,
                writers=(writer,),
                schema=schema_number(whole.schema.serialize().to_pybytes()),
                row_ids=np.array(rows.row_ids[chosen], np.int64).tobytes(),
                parts=1 << part,
            )
            yield put, whole


def _pieces(runs: Sequence[Run]) -> Iterator[tuple[pa.RecordBatch, slice]]:
    """Yield values that are there, and which of the rows they belong to."""
    start = 0
    for run in runs:
        num_rows = len(run.indices)
        if run.batch is not None:
            row_bytes = max(1, run.batch.nbytes // max(1, run.batch.num_rows))
            most = max(1, min(MAX_ROWS_A_FRAME, TARGET_BATCH_BYTES // row_bytes))
            for first in range(0, num_rows, most):
                indices = run.indices[first : first + most]
                yield _values(run.batch, indices), slice(start + first, start + first + len(indices))
        start += num_rows


def _values(batch: pa.RecordBatch, indices: Sequence[int]) -> pa.RecordBatch:
    if isinstance(indices, range):
        return batch.slice(indices.start, len(indices))
    return batch.take(pa.array(indices, pa.int64()))


def schema_number(schema: bytes) -> int:
    """Return the number by which frames refer to a schema: 63 bits of its hash."""
    return xxhash.xxh3_64_intdigest(schema) >> 1


def write_whole(path: Path, buffers: Iterable[bytes | memoryview]) -> int:
    """Write a file so that it is there whole or not at all; return its bytes.

    Raises:
        InvalidRequestError: it cannot be written.
    """
    draft = path.with_name(path.name + ".draft")
    num_bytes = 0
    try:
        with draft.open("wb") as file:
            for each in buffers:
                num_bytes += file.write(each)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise InvalidRequestError(f"snapshot: {path} must be a file to write, got: {error}") from error
    return num_bytes


def snapshot_directory(directory: Path, path: Path) -> int:
    """Write the queue of a directory that no server uses into a file; return its bytes.

    Raises:
        JournalDamagedError: the directory does not hold what was written.
    """
    opened = JournalDirectory(directory, create=False)
    try:
        broker = standing_broker()
        done = recover(opened, broker, ExtentIndex(), cut=False)
        frames = snapshot_frames(broker, journal=done.journal, seq=done.last_seq)
        return write_whole(path, (part for parts in frames for part in parts))
    finally:
        opened.close()


def restore_directory(path: Path, directory: Path) -> dict[str, int]:
    """Make a journal's directory from a snapshot; return the rows by table.

    Raises:
        InvalidRequestError: there is no such file, or the directory holds a journal already.
        JournalDamagedError: the file is not a whole snapshot.
    """
    try:
        data = map_file(path)
    except OSError as error:
        raise InvalidRequestError(f"restore: {path} must be a snapshot to read, got: {error}") from error
    opened = JournalDirectory(directory)
    try:
        if opened.files():
            raise InvalidRequestError(
                f"restore: {directory} must hold no journal yet, got {len(opened.files())} files of one; "
                "take another directory"
            )
        return restore_into(opened, path.name, data)
    finally:
        opened.close()


def restore_into(directory: JournalDirectory, where: str, data: memoryview) -> dict[str, int]:
    """Write the bytes of a snapshot as the files of a directory; see `restore_directory`."""
    rows: list[Frame] = []
    found = read_checkpoint(where, data, rows.append)
    if not found.is_whole or found.damages or found.head is None or found.head.role != "snapshot":
        what = "; ".join(f"at byte {each.offset}: {each.what}" for each in found.damages[:3])
        raise JournalDamagedError(
            f"restore: {where} must be a whole snapshot, got {what or 'another file'}; make the snapshot anew"
        )
    journal = found.head.journal or os.urandom(16).hex()
    target = directory.new_file("rows")
    head = r.FileHead(role="rows", journal=journal, number=target.number, seq=found.seq)
    buffers: list[Any] = frame(Kind.HEADER, found.seq, found.seq, r.encode(head))
    place = sum(map(len, buffers))
    places = {}
    for each in rows:
        places[each.offset] = place
        buffers.append(data[each.offset : each.end])
        place += each.end - each.offset
    extents: dict[TableKey, list[Extent]] = defaultdict(list)
    for record in found.extents:
        extent = extent_of(record)
        extent.file, extent.role, extent.offset = target.number, "rows", places[record.offset]
        extents[record.table, record.created].append(extent)
    state = directory.new_file("state")
    head = r.FileHead(
        role="state",
        journal=journal,
        number=state.number,
        seq=found.seq,
        clock_offset_s=found.head.clock_offset_s,
    )
    write_whole(target.path, buffers)
    frames = state_frames(head, found.tables, extents, found.schemas)
    write_whole(state.path, (part for parts in frames for part in parts))
    directory.sync_names()
    return {table.definitions[-1].table: len(table.state.rows.row_ids) for table in found.tables}
