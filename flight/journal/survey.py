"""What is in a journal's directory: what is whole, what a crash tore, what was damaged. It changes nothing.

Torn is what was being written when the power or the process went: bad bytes at the very end, nothing behind them but
what was written by the same call, and not known to have reached the disk. Nobody was told that it was done. Anything
else that is not as it was written is damage: something acknowledged may be lost, and people decide.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from flight.errors import JournalDamagedError
from flight.journal import records as r
from flight.journal.checkpoint import Checkpoint, read_checkpoint, read_head
from flight.journal.directory import JournalDirectory, JournalFile
from flight.journal.format import Damage, Frame, Kind, read_frames


@dataclass(frozen=True, slots=True)
class Fault:
    """A place that is not as it should be. `is_torn`: a crash explains it, and nothing acknowledged is concerned."""

    file: JournalFile | None
    offset: int
    what: str
    is_torn: bool = False

    def __str__(self) -> str:
        return f"{self.file.path.name} at byte {self.offset}: {self.what}" if self.file else self.what


@dataclass(kw_only=True)
class Log:
    """One log file: its decisions as far as they can be read, and its damaged places."""

    file: JournalFile
    data: memoryview
    head: r.FileHead | None = None
    frames: list[Frame] = field(default_factory=list)
    schemas: list[Frame] = field(default_factory=list)
    damages: list[tuple[int, Damage]] = field(default_factory=list)
    """(how many decisions are before it, place)."""


@dataclass(kw_only=True)
class Survey:
    """What recovery starts from. `logs` are those after the checkpoint, in order."""

    state: JournalFile | None = None
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logs: list[Log] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    journal: str = ""

    def damages(self) -> list[Fault]:
        """Return the faults that no crash explains."""
        return [fault for fault in self.faults if not fault.is_torn]

    def torn(self) -> list[Fault]:
        """Return the ends that were being written when the server went."""
        return [fault for fault in self.faults if fault.is_torn]


def survey(directory: JournalDirectory) -> Survey:
    """Look at all files of a directory.

    Raises:
        JournalDamagedError: a newer release wrote them.
    """
    found = Survey()
    _choose_state(directory, found)
    logs = [_read_log(file) for file in directory.files("log")]
    seq = found.checkpoint.seq
    # A log whose head was not written has nothing else; one that begins before the checkpoint is wholly in it.
    found.logs = [log for log in logs if log.head is None or log.head.seq >= seq]
    for log in found.logs:
        if log.head is not None:
            found.journal = found.journal or log.head.journal
            if log.head.journal != found.journal:
                found.faults.append(Fault(log.file, 0, "it is of another journal"))
    _check_order(found, seq, directory.synced_mark())
    return found


def map_file(path: Path) -> memoryview:
    """Return the bytes of a file, mapped."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def _choose_state(directory: JournalDirectory, found: Survey) -> None:
    """Take the newest checkpoint; it was renamed into place when it was whole, so a damaged one is no crash."""
    states = directory.files("state")
    if not states:
        return
    found.state = states[-1]
    found.checkpoint = read_checkpoint(found.state.path.name, map_file(found.state.path))
    found.faults += [Fault(found.state, damage.offset, damage.what) for damage in found.checkpoint.damages]
    if found.checkpoint.head is not None:
        found.journal = found.checkpoint.head.journal


def _read_log(file: JournalFile) -> Log:
    log = Log(file=file, data=map_file(file.path))
    for each in read_frames(log.data):
        if isinstance(each, Damage):
            log.damages.append((len(log.frames), each))
        elif each.kind is Kind.HEADER:
            log.head = read_head(file.path.name, each)
        elif each.kind is Kind.SCHEMA:
            log.schemas.append(each)
        elif each.kind in (Kind.DECISION, Kind.PUT):
            log.frames.append(each)
    return log


def _check_order(found: Survey, seq: int, mark: int) -> None:
    """Find what is torn, damaged or missing; `seq` is the last decision of the checkpoint."""
    for index, log in enumerate(found.logs):
        places = dict(reversed(log.damages))
        is_last = not any(len(later.data) for later in found.logs[index + 1 :])
        if log.head is None and not places:
            places[0] = Damage(0, "it has no header")
        if log.head is not None and log.head.seq != seq:
            found.faults.append(
                Fault(log.file, 0, f"decisions {_span(seq + 1, log.head.seq)} before it are missing")
            )
            seq = log.head.seq
        for number in range(len(log.frames) + 1):
            expected = seq + 1
            if number in places:
                rest = log.frames[number:]
                is_torn = is_last and all(each.first <= expected for each in rest) and mark < expected
                found.faults.append(Fault(log.file, places[number].offset, places[number].what, is_torn))
                if is_torn:
                    return
            if number == len(log.frames):
                break
            each = log.frames[number]
            if each.seq != expected and number not in places:
                found.faults.append(
                    Fault(log.file, each.offset, f"the number must be {expected}, got {each.seq}")
                )
            seq = each.seq
    if seq < mark:
        found.faults.append(
            Fault(
                None, 0, f"decisions {_span(seq + 1, mark)}, which were on the disk, are missing at the end"
            )
        )


def _span(first: int, last: int) -> str:
    return f"{first} to {last}"


def decisions(log: Log) -> Iterator[tuple[Frame, r.AnyDecision]]:
    """Yield the decisions of a log.

    Raises:
        JournalDamagedError: one cannot be understood.
    """
    for each in log.frames:
        try:
            yield each, r.decode_decision(each.head)
        except msgspec.MsgspecError as error:
            raise JournalDamagedError(
                f"{log.file.path.name} at byte {each.offset}: decision {each.seq} must be one that this release "
                f"knows, got: {error}; use the release that wrote it or a later one"
            ) from error
