"""Letting old logs go: a checkpoint of all tables, the last live rows of sparse files moved together, the rest deleted.

All of it happens beside the work: the broker's lock is held while the state is copied, the log's while the index is
looked up. A crash at any point leaves the old checkpoint and its files, or the new one and some files that nobody
refers to.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import structlog

from flight.errors import FlightQueueError, JournalDamagedError
from flight.journal import records as r
from flight.journal.checkpoint import read_head, state_frames
from flight.journal.config import JournalConfig
from flight.journal.directory import MIN_RESERVE_BYTES, JournalDirectory, JournalFile
from flight.journal.extents import Extent, TableKey, live_bytes
from flight.journal.format import Frame, Kind, frame, read_frame
from flight.journal.pins import Pin, Pins
from flight.journal.recovery import Recovered, read_extent
from flight.journal.survey import map_file
from flight.journal.writer import LogWriter

LOG = structlog.get_logger("flight.journal")

SPARSE = 0.5
"""Files of which less than this share is live are emptied."""

TICK_S = 0.25
RETRY_S = 0.5
"""Seconds between attempts to make room."""

DEADLINE_S = 60.0
Live = dict[TableKey, list[Extent]]


@dataclass(frozen=True, kw_only=True)
class Guarded:
    """What compaction works on. `capture` returns (last decision, clock offset, tables) and begins a new log."""

    directory: JournalDirectory
    log: LogWriter
    capture: Callable[[], tuple[int, float, list[r.TableRecord]]]
    config: JournalConfig
    has_room: Callable[[], None]
    pins: Pins


class Compactor:
    """A thread that makes a checkpoint when there is much to replay, or when somebody waits for room."""

    def __init__(self, guarded: Guarded, recovered: Recovered) -> None:
        self.num_checkpoints = 0
        self.moved_bytes = 0
        self._on = guarded
        self._at_bytes = -recovered.replayed_bytes
        self._at_seq = recovered.checkpoint_seq
        self._state_bytes = 0
        self._other_bytes = guarded.directory.num_bytes() - guarded.log.num_bytes
        """Bytes of all files, less what this server has written to logs."""
        self._is_asked = threading.Event()
        self._stopped = threading.Event()
        self.exclusive = threading.RLock()
        """Held while files are written that are not logs, or any are deleted."""
        self._thread = threading.Thread(target=self._run, name="journal-compaction", daemon=True)

    def start(self) -> None:
        """Begin to look after the directory."""
        self._on.directory.take_reserve()
        self._thread.start()

    def stop(self, deadline_s: float) -> None:
        """Finish what is in hand and end."""
        self._stopped.set()
        self._is_asked.set()
        self._thread.join(deadline_s)

    def ask(self) -> None:
        """Say that somebody waits for room."""
        self._is_asked.set()

    def num_bytes(self) -> int:
        """Return the bytes of all files."""
        return self._other_bytes + self._on.log.num_bytes

    # ---- when -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.is_set():
            is_asked = self._is_asked.wait(TICK_S)
            self._is_asked.clear()
            if self._stopped.is_set():
                return
            if is_asked or self._on.log.is_full or self._is_due():
                self._make_room(is_asked=is_asked)
                if is_asked or self._on.log.is_full:
                    self._stopped.wait(RETRY_S)

    def _make_room(self, *, is_asked: bool) -> None:
        try:
            self.checkpoint(sparse=1.0 if is_asked or self._on.log.is_full else SPARSE)
        except (FlightQueueError, OSError) as error:
            LOG.warning("the journal could not be compacted", error=str(error))
        if self._on.log.is_full and self._on.directory.take_reserve(self._reserve_bytes()):
            self._on.log.is_full = False
            LOG.warning("the disk of the journal has room again")
        self._on.has_room()

    def _is_due(self) -> bool:
        config, log = self._on.config, self._on.log
        num_bytes = log.num_bytes - self._at_bytes
        num_decisions = log.written - self._at_seq
        if num_decisions == 0 or num_bytes < 2 * self._state_bytes:
            return False
        return num_bytes >= config.checkpoint_bytes or num_decisions >= config.checkpoint_decisions

    def _reserve_bytes(self) -> int:
        return max(MIN_RESERVE_BYTES, 2 * self._state_bytes)

    # ---- how --------------------------------------------------------------------------------------------------

    def checkpoint(self, *, sparse: float = SPARSE) -> int:
        """Write the state down, move the live rows of sparse files, delete what is not needed; return the decision.

        Raises:
            JournalFullError: the disk has no room for it.
        """
        with self.exclusive:
            return self._checkpoint(sparse)

    def pin(self, checkpoint_id: str, check_room: Callable[[int], None]) -> int:
        """Write the state down as a checkpoint that is kept, instead of one of that name; return the decision.

        Raises:
            JournalFullError: the disk has no room for it.
        """
        directory, log, pins = self._on.directory, self._on.log, self._on.pins
        with self.exclusive:
            seq, offset_s, tables = self._on.capture()
            log.ensure(seq, sync=True, deadline_s=DEADLINE_S)
            live, schemas = self._live(tables, seq)
            file = directory.new_file("prepared")
            head = r.FileHead(
                role="pin",
                journal=log.journal,
                number=file.number,
                seq=seq,
                clock_offset_s=offset_s,
                checkpoint_id=checkpoint_id,
            )
            buffers = [part for parts in state_frames(head, tables, live, schemas) for part in parts]
            check_room(sum(map(len, buffers)))
            self._write(file, buffers)
            former = pins.find(checkpoint_id)
            pins.add(Pin(file=file, checkpoint_id=checkpoint_id, seq=seq, uses=places_of(live)))
            if former is not None:
                self.unpin(former)
            self._recount()
            return seq

    def unpin(self, pin: Pin) -> None:
        """Let a kept checkpoint go; what only it needed goes with the next checkpoint."""
        with self.exclusive:
            if self._on.pins.last_rewind > self._at_seq:
                # The log says that the tables became what a kept checkpoint says: it is needed to replay that.
                self._checkpoint(SPARSE)
            self._on.pins.forget(pin)
            self._on.directory.remove(pin.file)
            self._recount()

    def _recount(self) -> None:
        with self._on.log.io:
            self._other_bytes = self._on.directory.num_bytes() - self._on.log.num_bytes

    def _live(self, tables: list[r.TableRecord], seq: int) -> tuple[Live, dict[int, bytes]]:
        """Return where the rows of some tables lie, and the schemas."""
        rows = {
            (table.definitions[-1].table, table.created): np.array(table.state.rows.row_ids, np.int64)
            for table in tables
        }
        with self._on.log.io:
            return self._on.log.index.live(rows, seq), dict(self._on.log.index.schemas)

    def _checkpoint(self, sparse: float) -> int:
        directory, log = self._on.directory, self._on.log
        seq, offset_s, tables = self._on.capture()
        written_bytes = log.num_bytes
        log.ensure(seq, sync=True, deadline_s=DEADLINE_S)
        live, schemas = self._live(tables, seq)
        new: list[JournalFile] = []
        try:
            live, moved = self._move_sparse(live, schemas, seq, sparse)
            new += moved
            state = directory.new_file("state")
            head = r.FileHead(
                role="state", journal=log.journal, number=state.number, seq=seq, clock_offset_s=offset_s
            )
            self._write(
                state, [part for parts in state_frames(head, tables, live, schemas) for part in parts]
            )
            new.append(state)
        except BaseException:
            for file in new:
                directory.remove(file)
            raise
        with log.io:
            log.index.forget(live, seq)
        self._delete_old(state, live, seq)
        self._state_bytes = state.num_bytes
        self._at_bytes, self._at_seq = written_bytes, seq
        self._recount()
        if not log.is_full:
            directory.take_reserve(self._reserve_bytes())
        self.num_checkpoints += 1
        return seq

    def _move_sparse(
        self, live: Live, schemas: Mapping[int, bytes], seq: int, sparse: float
    ) -> tuple[Live, list[JournalFile]]:
        """Copy the live rows of files that are mostly garbage into a new file; return where all rows lie then."""
        by_file: dict[tuple[int, str], list[Extent]] = defaultdict(list)
        for extents in live.values():
            for extent in extents:
                by_file[extent.file, extent.role].append(extent)
        directory = self._on.directory
        sources = {}
        for (number, role), extents in by_file.items():
            if (number, role) in self._on.pins.uses():
                continue  # It stays anyway.
            file = directory.file(number, "log" if role == "log" else "rows")
            if live_bytes(extents) < sparse * 0.95 * file.num_bytes:
                sources[number, role] = file
        if not sources:
            return live, []
        target = directory.new_file("rows")
        buffers = frame(
            Kind.HEADER,
            seq,
            seq,
            r.encode(r.FileHead(role="rows", journal=self._on.log.journal, number=target.number, seq=seq)),
        )
        place = sum(map(len, buffers))
        moved: Live = {}
        data = {key: map_file(file.path) for key, file in sources.items()}
        for key, extents in live.items():
            moved[key] = []
            for extent in extents:
                source = data.get((extent.file, extent.role))
                if source is None:
                    moved[key].append(extent)
                    continue
                extent, parts = _copy(source, key, extent, schemas)
                moved[key].append(replace(extent, file=target.number, role="rows", offset=place))
                place += extent.num_bytes
                buffers += parts
        self._write(target, buffers)
        self.moved_bytes += place
        return moved, [target]

    def _write(self, file: JournalFile, buffers: list[object]) -> None:
        """Write a file, on the disk and whole before it has its name."""
        directory = self._on.directory
        draft = file.path.with_name(file.path.name + ".draft")
        descriptor = directory.disk.create(draft)
        try:
            directory.disk.write(descriptor, buffers)
            directory.disk.sync(descriptor)
        except OSError:
            draft.unlink()
            raise
        finally:
            os.close(descriptor)
        draft.rename(file.path)
        directory.sync_names()

    def _delete_old(self, state: JournalFile, live: Live, seq: int) -> None:
        """Delete older checkpoints, logs before this one, and moved rows, unless live or kept rows lie in them."""
        directory = self._on.directory
        used = places_of(live) | self._on.pins.uses()
        for file in directory.files("log", "rows", "state"):
            if (file.number, file.role) in used or file == state or file.number > state.number:
                continue
            if file.role == "log" and _first_decision(file) > seq:
                continue
            directory.remove(file)


def places_of(live: Live) -> frozenset[tuple[int, str]]:
    """Return the files, by number and role, in which rows lie."""
    return frozenset((extent.file, extent.role) for extents in live.values() for extent in extents)


def _copy(
    source: memoryview, key: TableKey, extent: Extent, schemas: Mapping[int, bytes]
) -> tuple[Extent, list[object]]:
    """Return the live rows of an extent as a frame of their own."""
    try:
        _, batch = read_extent(source, extent.record(key), schemas)
    except JournalDamagedError as error:
        raise JournalDamagedError(
            f"journal: rows of {key[0]} in file {extent.file} at byte {extent.offset} must be as they were written, "
            f"got: {error}; run python -m flight fsck on the directory"
        ) from error
    kept = np.flatnonzero(extent.row_ids >= 0)
    put = _put_of(extent, kept)
    body = batch.take(pa.array(kept)).serialize()
    parts = frame(Kind.ROWS, extent.seq, extent.seq, r.encode(put), body)
    row_ids = extent.row_ids[kept]
    return replace(extent, put=put, row_ids=row_ids, num_bytes=sum(map(len, parts))), parts


def _put_of(extent: Extent, kept: np.ndarray) -> r.Put:
    """Return what is said about some rows of an extent."""
    put = extent.put
    new_parts = np.frombuffer(put.new_parts, np.int64)[kept].tobytes() if put.new_parts else b""
    return r.Put(
        table=put.table,
        writers=put.writers,
        schema=put.schema,
        row_ids=extent.row_ids[kept].tobytes(),
        parts=put.parts,
        new_parts=new_parts,
    )


def _first_decision(file: JournalFile) -> int:
    """Return the number of a log's first decision, were it written yet; of a log that is just begun, a large one."""
    try:
        first = read_frame(map_file(file.path), 0)
    except FileNotFoundError:
        return sys.maxsize
    return read_head(file.path.name, first).seq + 1 if isinstance(first, Frame) else sys.maxsize
