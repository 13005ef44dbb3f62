"""A broker with a journal: recovery at the start, writing beside the work, room on disk. It knows no verbs but `close`.

A change is made and numbered under the broker's lock; the caller then waits outside it for the number to be on disk.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import structlog

from flight.broker import Logged, Wait
from flight.errors import FlightQueueError, InvalidRequestError, JournalFullError
from flight.journal import records as r
from flight.journal.checkpoint import capture
from flight.journal.compaction import SPARSE, Compactor, Guarded
from flight.journal.config import JournalConfig
from flight.journal.directory import Disk, JournalDirectory
from flight.journal.extents import ExtentIndex
from flight.journal.pins import Pins
from flight.journal.recovery import recover
from flight.journal.replay import ReplayingBroker
from flight.journal.transfer import schema_number
from flight.journal.writer import Body, LogWriter

LOG = structlog.get_logger("flight.journal")

DEADLINE_S = 30.0
"""How long a change that has no deadline of its own waits for the disk."""

FLUSH_S = 0.1
"""Within this, what nobody waits for (takes, renewals, expiries) is written too."""

MAX_UNSYNCED_FILES = 4
"""Logs that stay open without having been synced, if no table asks for it."""

FRAME_BYTES = 512
"""About what a put needs beside its rows."""


class KeepingBroker(ReplayingBroker):
    """A broker and its journal; which verb waits for what is said in `flight.journal.broker`."""

    def __init__(
        self,
        config: JournalConfig,
        *,
        disk: Disk | None = None,
        wall: Callable[[], float] = time.time,
        **options: Any,
    ) -> None:
        """Recover what the directory holds, void the leases of the server before, and begin to write.

        Raises:
            InvalidRequestError: the directory cannot be used.
            JournalDamagedError: it does not hold what was written; the message says where and what to do.
        """
        super().__init__(**options)
        self._config = config
        self._directory = JournalDirectory(Path(config.directory), disk=disk)
        index = ExtentIndex()
        try:
            self.recovered = recover(self._directory, self, index)
            self._pins = Pins(self._directory, last_rewind=self.recovered.last_rewind)
        except FlightQueueError:
            self._directory.close()
            raise
        self._check_spill()
        self._log = LogWriter(
            self._directory,
            index,
            journal=self.recovered.journal or uuid.uuid4().hex,
            last_seq=self.recovered.last_seq,
            segment_bytes=config.segment_bytes,
        )
        self._last_put: dict[str, int] = {}
        self._reserved_bytes = 0
        self._room = threading.Condition(threading.Lock())
        now = self.clock()
        opened = r.Opened(clock_offset_s=wall() - now, now=now)
        self.replay(self._log.append(opened), opened)
        self._recording.say = self._write_down
        guarded = Guarded(
            directory=self._directory,
            log=self._log,
            capture=self._capture,
            config=config,
            has_room=self._notify_room,
            pins=self._pins,
        )
        self._compactor = Compactor(guarded, self.recovered)
        self._stopped = threading.Event()
        self._flusher = threading.Thread(target=self._flush, name="journal-flush", daemon=True)
        self._flusher.start()
        self._compactor.start()
        done = self.recovered
        LOG.info(
            "journal recovered",
            directory=config.directory,
            decisions=done.num_replayed,
            torn_bytes=done.torn_bytes,
            seconds=round(done.seconds, 3),
        )

    def _check_spill(self) -> None:
        tables = [name for name, table in self._ledger.tables.items() if table.spec.spill]
        if tables and self._spill is None:
            self._directory.close()
            raise InvalidRequestError(
                f"serve: a server whose journal has tables with spill must have a directory for it, got none for "
                f"{tables}; start it with --spill-dir"
            )

    def close(self) -> None:
        """Refuse calls, write what waits, and let the directory go."""
        super().close()
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._notify_room()
        self._flusher.join(DEADLINE_S)
        self._compactor.stop(DEADLINE_S)
        try:
            self._log.close()
        except FlightQueueError as error:
            LOG.error("the last changes are not on disk; none of them was acknowledged", error=str(error))
        self._directory.close()

    @property
    def remembers(self) -> bool:
        """See `BrokerCore.remembers`."""
        return True

    def journal_stats(self) -> dict[str, Any]:
        """Return what the journal has done since the start, and what recovery found."""
        done = self.recovered
        return {
            "directory": self._config.directory,
            "bytes": self._compactor.num_bytes(),
            "limit_bytes": self._config.limit_bytes,
            "last_decision": self._log.last_seq,
            "written": self._log.written,
            "synced": self._log.synced,
            "syncs": self._log.num_syncs,
            "groups": self._log.num_groups,
            "written_bytes": self._log.num_bytes,
            "is_full": self._log.is_full,
            "failure": self._log.failure,
            "checkpoints": self._compactor.num_checkpoints,
            "kept_checkpoints": len(self._pins.all()),
            "moved_bytes": self._compactor.moved_bytes,
            "recovered_decisions": done.num_replayed,
            "recovery_s": done.seconds,
            "torn_ends": done.num_torn,
            "torn_bytes": done.torn_bytes,
        }

    def position(self) -> int:
        """Return the number of the last decision: what a checkpoint of a consumer would name."""
        return self._log.last_seq

    def checkpoint(self, *, sparse: float = SPARSE) -> int:
        """Write all tables down now and let old logs go; return the last decision that is in the checkpoint."""
        return self._compactor.checkpoint(sparse=sparse)

    def flush(self) -> None:
        """Return once all changes so far are on the disk."""
        self._log.ensure(self._log.last_seq, sync=True, deadline_s=DEADLINE_S)

    # ---- writing ----------------------------------------------------------------------------------------------

    def _to_journal(self, batch: pa.RecordBatch) -> tuple[pa.Buffer, bytes]:
        return batch.serialize(), batch.schema.serialize().to_pybytes()

    def _write_down(self, decision: r.Decision) -> None:
        seq = self._log.append(decision)
        if isinstance(decision, r.TableCreated):
            self.created[decision.definition.table] = seq
        elif isinstance(decision, r.TableDropped):
            del self.created[decision.table]

    def _log_put(self, name: str, put: Logged) -> None:
        outcome = put.outcome
        if not any(outcome.new_parts):
            return  # All of it is there already, written or waiting to be.
        is_uniform = len(set(outcome.new_parts)) == 1
        decision = r.Put(
            table=name,
            writers=put.writers,
            schema=schema_number(put.schema),
            row_ids=np.array(outcome.row_ids, np.int64).tobytes(),
            parts=outcome.new_parts[0] if is_uniform else 0,
            new_parts=b"" if is_uniform else np.array(outcome.new_parts, np.int64).tobytes(),
            now=put.now,
        )
        self._last_put[name] = self._log.append(
            decision, Body((name, self.created[name]), put.message, put.schema)
        )

    def _capture(self) -> tuple[int, float, list[r.TableRecord]]:
        """Return the state after the last decision; decisions from now on go into a new log."""
        with self._lock:
            return self._log.rotate(), self.clock_offset_s or 0.0, capture(self._ledger, self.created)

    def _durable(self, name: str, deadline_s: float = DEADLINE_S, *, seq: int | None = None) -> None:
        """Wait until all changes so far (or those up to `seq`) are as durable as a table asks."""
        table = self._ledger.tables.get(name)
        sync = table is None or table.spec.fsync == "batch"
        self._log.ensure(self._log.last_seq if seq is None else seq, sync=sync, deadline_s=deadline_s)

    def _flush(self) -> None:
        """Write what nobody waits for, and sync for the tables that ask for it from time to time."""
        next_sync = time.monotonic() + self._config.fsync_interval_s
        pause = min(FLUSH_S, self._config.fsync_interval_s)
        while not self._stopped.wait(pause):
            is_due = time.monotonic() >= next_sync
            with self._lock:
                policies = {table.spec.fsync for table in self._ledger.tables.values()}
            try:
                sync = is_due and (policies != {"none"} or self._log.num_unsynced_files > MAX_UNSYNCED_FILES)
                self._log.ensure(self._log.last_seq, sync=sync, deadline_s=DEADLINE_S)
            except FlightQueueError as error:
                LOG.warning("the journal cannot be written", error=str(error))
                self._stopped.wait(1.0)
            if is_due:
                next_sync = time.monotonic() + self._config.fsync_interval_s

    # ---- room -------------------------------------------------------------------------------------------------

    @contextmanager
    def _admitted(self, name: str, num_bytes: int, wait: Wait) -> Iterator[None]:
        """Keep room on disk for a put while it is made; wait for it until the deadline.

        Raises:
            JournalFullError: no room came.
        """
        with self._room:
            while lack := self._lack_of_disk(num_bytes):
                left_s = wait.deadline - self.clock()
                if left_s <= 0 or self._stopped.is_set() or wait.is_gone():
                    raise JournalFullError(
                        f"put into {name}: the journal must have room for {num_bytes} bytes before the deadline, "
                        f"got {lack}; finish rows, truncate or drop a table, release a checkpoint, or make room on "
                        "the disk"
                    )
                self._compactor.ask()
                self._room.wait(min(left_s, 1.0))
            self._reserved_bytes += num_bytes
        try:
            yield
        finally:
            with self._room:
                self._reserved_bytes -= num_bytes

    def _lack_of_disk(self, num_bytes: int) -> str:
        free_bytes = self._directory.disk.free_bytes(self._directory.path) - self._reserved_bytes
        if self._log.is_full or free_bytes < num_bytes:
            return f"a full disk under {self._config.directory}"
        limit = self._config.limit_bytes
        if limit is None:
            return ""
        used = self._compactor.num_bytes() + self._reserved_bytes
        return f"{used} of limit_bytes {limit} in use" if used + num_bytes > limit else ""

    def _notify_room(self) -> None:
        with self._room:
            self._room.notify_all()
