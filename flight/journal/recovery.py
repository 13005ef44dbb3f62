"""Reading a journal back: the checkpoint, the values of its rows, the decisions after it; torn ends are cut."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import structlog

from flight.errors import JournalDamagedError
from flight.journal import records as r
from flight.journal.checkpoint import read_checkpoint
from flight.journal.directory import JournalDirectory, JournalFile
from flight.journal.extents import Extent, ExtentIndex, extent_of
from flight.journal.format import Damage, Frame, Kind, read_frame
from flight.journal.replay import ReplayingBroker
from flight.journal.survey import Fault, Log, Survey, decisions, map_file, survey

LOG = structlog.get_logger("flight.journal")
MAX_FAULTS_TOLD = 5


@dataclass(kw_only=True)
class Recovered:
    """What recovery found and did."""

    journal: str = ""
    last_seq: int = 0
    checkpoint_seq: int = 0
    num_replayed: int = 0
    replayed_bytes: int = 0
    num_torn: int = 0
    torn_bytes: int = 0
    last_rewind: int = 0
    """The last decision to rewind that was replayed; it needs the kept checkpoint that it names."""
    lost: list[str] = field(default_factory=list)
    """What a lenient recovery had to leave out, in words."""
    seconds: float = 0.0


def recover(
    directory: JournalDirectory,
    broker: ReplayingBroker,
    index: ExtentIndex,
    *,
    is_lenient: bool = False,
    cut: bool = True,
) -> Recovered:
    """Make the tables of an empty broker from a directory, and note where the values lie.

    Raises:
        JournalDamagedError: something was damaged; the message says where, and what to do. A lenient recovery takes
            what it can read and says what it left out. Without `cut` the files stay as they are.
    """
    began = time.monotonic()
    found = survey(directory)
    if found.damages() and not is_lenient:
        raise JournalDamagedError(_refusal(directory, found.damages()))
    done = Recovered(journal=found.journal, checkpoint_seq=found.checkpoint.seq)
    done.lost += [str(fault) for fault in found.damages()]
    restore(directory, broker, index, found, done)
    done.last_seq = max(found.checkpoint.seq, directory.synced_mark() if is_lenient else 0)
    torn = found.torn()
    for log in found.logs:
        _replay((directory, broker, index), log, done, torn)
    for fault in torn if cut else ():
        _cut(fault, done)
    done.lost += [f"{broker.num_left_out} decisions did not fit"] if broker.num_left_out else []
    done.seconds = time.monotonic() - began
    return done


def restore(
    directory: JournalDirectory,
    broker: ReplayingBroker,
    index: ExtentIndex,
    found: Survey,
    done: Recovered,
) -> None:
    """Take the checkpoint: its tables, and the values of their rows from wherever they lie."""
    checkpoint = found.checkpoint
    if checkpoint.head is not None:
        broker.clock_offset_s = checkpoint.head.clock_offset_s
    broker.restore_tables(checkpoint.tables)
    index.schemas |= checkpoint.schemas
    files: dict[tuple[int, str], memoryview] = {}
    for record in checkpoint.extents:
        place = (record.file, record.role)
        path = directory.path / f"{record.file:010d}.{record.role}"
        try:
            if place not in files:
                files[place] = map_file(path)
            extent, batch = read_extent(files[place], record, index.schemas)
        except (JournalDamagedError, FileNotFoundError, KeyError) as error:
            if not broker.is_lenient:
                raise JournalDamagedError(
                    _refusal(directory, [Fault(None, 0, f"{path.name} at byte {record.offset}: {error}")])
                ) from error
            done.lost.append(f"rows of {record.table} in {path.name} at byte {record.offset}: {error}")
            continue
        if broker.created.get(record.table) == record.created:
            index.add((record.table, record.created), extent)
            broker.restore_rows(record.table, extent, batch)


def read_extent(
    data: memoryview, record: r.ExtentRecord, schemas: Mapping[int, bytes]
) -> tuple[Extent, pa.RecordBatch]:
    """Read the rows of an extent.

    Raises:
        JournalDamagedError: they are not there as they were written.
    """
    each = read_frame(data, record.offset)
    if isinstance(each, Damage):
        raise JournalDamagedError(each.what)
    if each.kind not in (Kind.PUT, Kind.ROWS) or each.end - each.offset != record.num_bytes:
        raise JournalDamagedError("other rows are there")
    return extent_of(record), read_batch(each, schemas[record.put.schema])


def read_batch(each: Frame, schema: bytes) -> pa.RecordBatch:
    """Return the rows of a frame, copied out of the file."""
    body = pa.py_buffer(bytes(each.body))
    return pa.ipc.read_record_batch(body, pa.ipc.read_schema(pa.py_buffer(schema)))


def restore_pin(
    directory: JournalDirectory, file: JournalFile, broker: ReplayingBroker, prefix: str
) -> tuple[ReplayingBroker, ExtentIndex]:
    """Return a broker with the tables of a kept checkpoint, for another to become, and where their values lie.

    Raises:
        JournalDamagedError: it does not hold what was written.
    """
    checkpoint = read_checkpoint(file.path.name, map_file(file.path))
    if checkpoint.damages:
        raise JournalDamagedError(
            _refusal(directory, [Fault(file, each.offset, each.what) for each in checkpoint.damages])
        )
    other, index = broker.empty_twin(prefix), ExtentIndex()
    restore(directory, other, index, Survey(state=file, checkpoint=checkpoint), Recovered())
    return other, index


def _replay(
    place: tuple[JournalDirectory, ReplayingBroker, ExtentIndex], log: Log, done: Recovered, torn: list[Fault]
) -> None:
    directory, broker, index = place
    end = min((fault.offset for fault in torn if fault.file == log.file), default=len(log.data))
    for each in log.schemas:
        index.schemas[r.decode(each.head, int)] = bytes(each.body)
    for each, decision in decisions(log):
        if each.offset >= end:
            break
        batch = None
        if isinstance(decision, r.Put):
            batch = read_batch(each, index.schemas[decision.schema])
        if isinstance(decision, r.Rewound):
            try:
                other, rewound = restore_pin(directory, directory.pin(decision.pin), broker, f"{each.seq}-")
            except JournalDamagedError as error:
                if not broker.is_lenient:
                    raise
                done.lost.append(str(error))
                continue
            broker.become(other, decision.now)
            index.replace(rewound)
            done.last_rewind = each.seq
        else:
            broker.replay(each.seq, decision, batch)
        if isinstance(decision, r.Put) and decision.table in broker.created:
            key = (decision.table, broker.created[decision.table])
            index.add(key, _extent(log, each, decision))
        done.last_seq = max(done.last_seq, each.seq)
        done.num_replayed += 1
    done.replayed_bytes += end


def _extent(log: Log, each: Frame, put: r.Put) -> Extent:
    record = r.ExtentRecord(
        table=put.table,
        created=0,
        file=log.file.number,
        role="log",
        offset=each.offset,
        num_bytes=each.end - each.offset,
        seq=each.seq,
        put=put,
    )
    return extent_of(record)


def _cut(fault: Fault, done: Recovered) -> None:
    """Remove a torn end, so that nothing is ever found behind it."""
    if fault.file is None:
        return
    num_bytes = fault.file.num_bytes - fault.offset
    done.num_torn += 1
    done.torn_bytes += num_bytes
    if fault.offset == 0:
        fault.file.path.unlink()
    else:
        descriptor = os.open(fault.file.path, os.O_WRONLY)
        try:
            os.ftruncate(descriptor, fault.offset)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    LOG.warning(
        "a torn end of the journal was cut; nothing in it was acknowledged",
        file=str(fault.file.path),
        offset=fault.offset,
        num_bytes=num_bytes,
        what=fault.what,
    )


def _refusal(directory: JournalDirectory, faults: list[Fault]) -> str:
    told = "; ".join(str(fault) for fault in faults[:MAX_FAULTS_TOLD])
    more = f" and {len(faults) - MAX_FAULTS_TOLD} more" if len(faults) > MAX_FAULTS_TOLD else ""
    return (
        f"journal: {directory.path} must be as it was written, got {len(faults)} damaged place(s): {told}{more}; "
        f"copy the directory, then run `python -m flight fsck {directory.path} --repair` to save what can be read"
    )
