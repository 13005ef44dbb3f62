"""The log: decisions go in under the broker's lock and reach the disk in groups, outside it.

    append   a decision gets its number and waits in memory (no system call)
    ensure   who needs it on disk writes all that waits, his own and others', and syncs once for all of them; who
             comes meanwhile waits for that, and finds most often that his decision went along

What cannot be written because the disk is full stays in memory and is written when there is room; whoever waited for it
is told. Any other failure of the disk is final: nobody knows then what is on it.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from flight.errors import DeadlineExceededError, JournalFullError, UnavailableError
from flight.journal import records as r
from flight.journal.directory import JournalDirectory, JournalFile
from flight.journal.extents import Extent, ExtentIndex, TableKey
from flight.journal.format import Kind, frame

GROUP_RECORDS = 256
GROUP_BYTES = 64 << 20
"""Most that is written by one call."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True)
class Body:
    """The rows of a put: the Arrow messages of the record batch and of its schema."""

    key: TableKey
    data: Any
    schema: bytes


@dataclass(slots=True)
class Waiting:
    """A decision that is not written yet; without one, the next goes into a new file."""

    seq: int
    decision: r.Decision | None
    body: Body | None = None
    num_bytes: int = 0
    index: ExtentIndex | None = None
    """Where rows lie once this decision is made, if it is not what was before."""


class LogWriter:
    """The end of the log. `append` and `rotate` need the broker's lock, `ensure` may be called by anybody."""

    def __init__(
        self,
        directory: JournalDirectory,
        index: ExtentIndex,
        *,
        journal: str,
        last_seq: int,
        segment_bytes: int,
    ) -> None:
        self.last_seq = last_seq
        """Number of the last decision."""
        self.written = last_seq
        self.synced = last_seq
        self.file: JournalFile | None = None
        """The log that is written to, None before the first decision."""
        self.is_full = False
        """Whether the disk had no room the last time."""
        self.failure = ""
        """What broke for good, empty if nothing did."""
        self.num_syncs = 0
        self.num_groups = 0
        self.num_bytes = 0
        """Bytes written to logs since the start."""
        self.index = index
        self._syncing = threading.Lock()
        self.io = threading.Lock()
        """Held while files are written or the index is changed."""
        self._directory = directory
        self.journal = journal
        self._segment_bytes = segment_bytes
        self._waiting: deque[Waiting] = deque()
        self._descriptor = -1
        self._offset = 0
        self._schemas_in_file: set[int] = set()
        self._unsynced: list[int] = []
        self._has_new_names = False

    @property
    def num_unsynced_files(self) -> int:
        """Return how many files hold what is not known to be on the disk."""
        return len(self._unsynced)

    # ---- under the broker's lock ------------------------------------------------------------------------------

    def append(
        self, decision: r.Decision, body: Body | None = None, *, index: ExtentIndex | None = None
    ) -> int:
        """Number a decision and let it wait to be written; with it `index` replaces the present one."""
        self.last_seq += 1
        num_bytes = len(body.data) if body else 0
        self._waiting.append(Waiting(self.last_seq, decision, body, num_bytes, index))
        return self.last_seq

    def rotate(self) -> int:
        """Let decisions from now on go into a new file; return the last number before."""
        self._waiting.append(Waiting(self.last_seq, None))
        return self.last_seq

    # ---- by anybody -------------------------------------------------------------------------------------------

    def ensure(self, seq: int, *, sync: bool, deadline_s: float) -> None:
        """Return once all decisions up to `seq` are written, with `sync` on the disk.

        Raises:
            DeadlineExceededError: that takes longer.
            JournalFullError: the disk has no room for them; they stay in memory until it has.
            UnavailableError: the disk is broken.
        """
        if seq <= (self.synced if sync else self.written):
            return
        end = time.monotonic() + max(deadline_s, 0.0)
        if seq > self.written:
            with self._within(self.io, seq, end):
                self._check()
                if seq > self.written:
                    self._write()
        if sync and seq > self.synced:
            with self._within(self._syncing, seq, end):
                self._check()
                if seq > self.synced:
                    self._sync()

    @contextmanager
    def _within(self, lock: threading.Lock, seq: int, end: float) -> Iterator[None]:
        if not lock.acquire(timeout=min(max(end - time.monotonic(), 0.0), threading.TIMEOUT_MAX)):
            raise DeadlineExceededError(
                f"journal: change {seq} must be on disk before the deadline, got a disk that is busy for longer; "
                "the change is made: repeat the request to wait for it"
            )
        try:
            yield
        finally:
            lock.release()

    def _check(self) -> None:
        if self.failure:
            raise UnavailableError(
                f"journal: the disk must work, got: {self.failure}; restart the server on a working disk"
            )

    def close(self) -> None:
        """Write what waits and let the files go."""
        try:
            self.ensure(self.last_seq, sync=True, deadline_s=10.0)
        finally:
            with self._syncing, self.io:
                self.failure = self.failure or "the server has stopped"
                for descriptor in {*self._unsynced, self._descriptor} - {-1}:
                    os.close(descriptor)
                self._unsynced, self._descriptor = [], -1

    # ---- with `io` --------------------------------------------------------------------------------------------

    def _write(self) -> None:
        while self._waiting:
            if self._waiting[0].decision is None:
                self._waiting.popleft()
                self._finish_file()
                continue
            group = self._next_group()
            try:
                self._write_group(group)
            except OSError as error:
                self._waiting.extendleft(reversed(group))
                self._note_failure(error)

    def _next_group(self) -> list[Waiting]:
        group: list[Waiting] = []
        num_bytes = 0
        while self._waiting and len(group) < GROUP_RECORDS and num_bytes < GROUP_BYTES:
            if self._waiting[0].decision is None:
                break
            group.append(self._waiting.popleft())
            num_bytes += group[-1].num_bytes
        return group

    def _write_group(self, group: list[Waiting]) -> None:
        """Write decisions; if that fails, the file is as it was."""
        if self._descriptor < 0 or self._offset >= self._segment_bytes:
            self._begin_file(group[0].seq - 1)
        buffers: list[Any] = []
        extents: list[tuple[TableKey, Extent] | ExtentIndex] = []
        schemas: dict[int, bytes] = {}
        offset = self._offset
        for each in group:
            put = each.decision
            if isinstance(put, r.Put) and each.body is not None and self._is_new(put.schema, schemas):
                schemas[put.schema] = each.body.schema
                parts = frame(Kind.SCHEMA, each.seq, group[0].seq, r.encode(put.schema), each.body.schema)
                offset += sum(map(len, parts))
                buffers += parts
            parts = self._frame(each, group[0].seq)
            num_bytes = sum(map(len, parts))
            if isinstance(put, r.Put) and each.body is not None:
                extents.append((each.body.key, self._extent(each, put, offset, num_bytes)))
            if each.index is not None:
                extents.append(each.index)
            offset += num_bytes
            buffers += parts
        try:
            self._write_or_use_reserve(buffers)
        except OSError:
            self._cut()
            raise
        self.num_bytes += offset - self._offset
        self._offset = offset
        self._schemas_in_file |= schemas.keys()
        self.index.schemas |= schemas
        self.num_groups += 1
        for found in extents:
            if isinstance(found, ExtentIndex):
                self.index.replace(found)
            else:
                self.index.add(*found)
        if self._descriptor not in self._unsynced:
            self._unsynced.append(self._descriptor)
        self.written = group[-1].seq

    def _is_new(self, schema: int, coming: dict[int, bytes]) -> bool:
        return schema not in self._schemas_in_file and schema not in coming

    def _write_or_use_reserve(self, buffers: list[Any]) -> None:
        try:
            self._directory.disk.write(self._descriptor, buffers)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._cut()
            self.is_full = True
            self._directory.use_reserve()
            self._directory.disk.write(self._descriptor, buffers)

    def _cut(self) -> None:
        """Remove what a failed write has left behind."""
        os.ftruncate(self._descriptor, self._offset)
        os.lseek(self._descriptor, self._offset, os.SEEK_SET)

    def _frame(self, each: Waiting, first: int) -> list[Any]:
        decision, body = each.decision, each.body
        if body is None or not isinstance(decision, r.Put):
            return frame(Kind.DECISION, each.seq, first, r.encode(decision))
        return frame(Kind.PUT, each.seq, first, r.encode(decision), body.data)

    def _extent(self, each: Waiting, put: r.Put, offset: int, num_bytes: int) -> Extent:
        number = self.file.number if self.file is not None else 0
        row_ids = np.frombuffer(put.row_ids, np.int64)
        return Extent(number, "log", offset, num_bytes, each.seq, put, row_ids)

    def _begin_file(self, seq: int) -> None:
        self._finish_file()
        file = self._directory.new_file("log")
        head = r.FileHead(role="log", journal=self.journal, number=file.number, seq=seq)
        self._descriptor, self._offset = self._directory.disk.create(file.path), 0
        parts = frame(Kind.HEADER, seq, seq, r.encode(head))
        try:
            self._write_or_use_reserve(parts)
        except OSError:
            os.close(self._descriptor)
            self._descriptor = -1
            file.path.unlink()
            raise
        self.file, self._offset = file, sum(map(len, parts))
        self._schemas_in_file = set()
        self._has_new_names = True

    def _finish_file(self) -> None:
        """Close the present file; it is still to be synced if it has something new."""
        if self._descriptor >= 0 and self._descriptor not in self._unsynced:
            os.close(self._descriptor)
        self._descriptor = -1

    # ---- with `_syncing`, not `io`: others may write meanwhile ------------------------------------------------

    def _sync(self) -> None:
        with self.io:
            seq, descriptors, current = self.written, list(self._unsynced), self._descriptor
            has_new_names, self._has_new_names = self._has_new_names, False
        try:
            for descriptor in descriptors:
                self._directory.disk.sync(descriptor)
            if has_new_names:
                self._directory.sync_names()
        except OSError as error:
            # What the kernel could not write it may drop: a later sync would succeed and say nothing.
            self.failure = str(error)
            raise UnavailableError(
                f"journal: changes must reach the disk, got: {error}; restart the server on a working disk"
            ) from error
        with self.io:
            for descriptor in descriptors:
                # What was the present file then may have got more since, and may be finished by now.
                if descriptor != current or self.written == seq:
                    self._unsynced.remove(descriptor)
                    if descriptor != self._descriptor:
                        os.close(descriptor)
        self.num_syncs += 1
        self.synced = seq
        self._directory.mark_synced(seq)

    def _note_failure(self, error: OSError) -> None:
        """Raise what callers are told."""
        if error.errno in _FULL:
            self.is_full = True
            raise JournalFullError(
                f"journal: the disk of {self._directory.path} must have room, got: {os.strerror(error.errno)}; "
                "the change is in memory and will be written when there is room: make some, then repeat the request"
            ) from error
        self.failure = str(error)
        raise UnavailableError(
            f"journal: changes must be written, got: {error}; restart the server on a working disk"
        ) from error
