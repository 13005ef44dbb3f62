"""Is a journal as it was written? What is in it, what is torn, what is damaged; and saving what can be read.

A repair reads all that is whole, leaves out what does not fit, writes that down as a new checkpoint, and moves the old
files into `damaged-N/`, where they stay. Values that are gone take their rows along, and rows that refer to these:
their uids may be put again. Kept checkpoints that can be gone back to stay what and where they are, with
the files in which their rows lie.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from flight.errors import JournalDamagedError
from flight.journal.directory import PIN_ROLES, JournalDirectory, JournalFile
from flight.journal.extents import ExtentIndex
from flight.journal.format import Frame, Kind, read_frame
from flight.journal.pins import read_pin
from flight.journal.recovery import recover, restore_pin
from flight.journal.replay import ReplayingBroker, standing_broker
from flight.journal.survey import map_file, survey
from flight.journal.transfer import restore_into, snapshot_frames


@dataclass(kw_only=True)
class Report:
    """What `fsck` found. A journal is sound if a server starts on it by itself: torn ends are, damage is not."""

    directory: str
    num_files: int = 0
    num_bytes: int = 0
    last_decision: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    """Rows by table."""
    torn: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """What a repair could not save (or would not, if none was asked for)."""
    kept: dict[str, str] = field(default_factory=dict)
    """What became of each kept checkpoint, by its file: its name and status, or what is wrong with it."""
    is_repaired: bool = False

    @property
    def is_sound(self) -> bool:
        """Return whether a server can start on the directory."""
        return not self.damaged or self.is_repaired


def fsck(path: Path, *, repair: bool = False) -> Report:
    """Check a directory that no server uses; with `repair`, make it one that a server starts on.

    Raises:
        InvalidRequestError: it is not a directory, or a server uses it.
        JournalDamagedError: a newer release wrote it.
    """
    directory = JournalDirectory(path, create=False)
    try:
        return _check(directory, repair=repair)
    finally:
        directory.close()


def _check(directory: JournalDirectory, *, repair: bool) -> Report:
    found = survey(directory)
    report = Report(
        directory=str(directory.path),
        num_files=len(directory.files()),
        num_bytes=directory.num_bytes(),
        torn=[str(fault) for fault in found.torn()],
        damaged=[str(fault) for fault in found.damages()],
    )
    for file in directory.files(*PIN_ROLES):
        try:
            pin = read_pin(file)
            report.kept[file.path.name] = f"{pin.checkpoint_id!r}, {pin.status}"
        except JournalDamagedError as error:
            report.kept[file.path.name] = str(error)
    broker = standing_broker()
    if not report.damaged:
        try:
            done = recover(directory, broker, ExtentIndex(), cut=repair)
        except JournalDamagedError as error:
            report.damaged.append(str(error))
    if report.damaged:
        broker = standing_broker(is_lenient=True)
        done = recover(directory, broker, ExtentIndex(), is_lenient=True, cut=False)
        report.lost = done.lost + [
            f"{num_rows} rows of {name} have lost values and are left out"
            for name, num_rows in broker.retract_rows_without_values().items()
        ]
        if repair:
            _replace(directory, broker, done.journal, done.last_seq)
            report.is_repaired = True
    report.last_decision = done.last_seq
    report.rows = {name: broker.size(name)[0] for name in broker.list_tables()}
    return report


def _replace(directory: JournalDirectory, broker: ReplayingBroker, journal: str, seq: int) -> None:
    """Move the old files aside and write what was read as a new checkpoint; a crash on the way loses nothing."""
    parts = [part for parts in snapshot_frames(broker, journal=journal, seq=seq) for part in parts]
    data = memoryview(b"".join(parts))
    number = 1
    while (aside := directory.path / f"damaged-{number}").exists():
        number += 1
    aside.mkdir(mode=0o700)
    needed = _needed_by_whole_pins(directory)
    for file in directory.files():
        if file in needed:
            shutil.copyfile(file.path, aside / file.path.name)
        else:
            os.replace(file.path, aside / file.path.name)
    restore_into(directory, "repair", data)


def _needed_by_whole_pins(directory: JournalDirectory) -> set[JournalFile]:
    """Return the kept checkpoints that can be gone back to, with all files in which their rows lie.

    A log that cannot say where it begins does not count: a server could not tell it from one to be replayed.
    """
    needed: set[JournalFile] = set()
    for file in directory.files(*PIN_ROLES):
        try:
            pin = read_pin(file)
            restore_pin(directory, file, standing_broker(), "")
        except JournalDamagedError:
            continue
        used = {each for each in directory.files("log", "rows") if (each.number, each.role) in pin.uses}
        if all(_has_header(each) for each in used):
            needed |= {file, *used}
    return needed


def _has_header(file: JournalFile) -> bool:
    first = read_frame(map_file(file.path), 0)
    return isinstance(first, Frame) and first.kind is Kind.HEADER
