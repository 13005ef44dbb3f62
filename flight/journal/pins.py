"""Checkpoints that somebody keeps: state files of their own that compaction neither deletes nor empties.

    prepare --> N.prepared --commit (a rename)--> N.committed --release--> gone

Their owners' names for them are inside the files and never in a path.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import structlog

from flight.errors import InvalidRequestError, JournalDamagedError
from flight.journal import records as r
from flight.journal.checkpoint import read_head
from flight.journal.directory import PIN_ROLES, JournalDirectory, JournalFile
from flight.journal.format import Damage, Kind, read_frames
from flight.journal.survey import map_file

LOG = structlog.get_logger("flight.journal")

MAX_PINS = 64
"""Checkpoints that may be kept at a time."""

MAX_ID_CHARS = 256


@dataclass(frozen=True, kw_only=True)
class Pin:
    """A kept checkpoint. `seq` is its last decision, `uses` the files, by number and role, in which its rows lie."""

    file: JournalFile
    checkpoint_id: str
    seq: int
    uses: frozenset[tuple[int, str]]

    @property
    def status(self) -> Literal["prepared", "committed"]:
        """Return whether its owner has said that what belongs to it is durable."""
        return "committed" if self.file.role == "committed" else "prepared"


class Pins:
    """The kept checkpoints of a directory. Thread-safe."""

    def __init__(self, directory: JournalDirectory, *, last_rewind: int = 0) -> None:
        """Find the kept checkpoints; a damaged one is left alone and cannot be used."""
        self.last_rewind = last_rewind
        """The last decision to rewind; the checkpoint that it names must not go before a later state is written."""
        self._directory = directory
        self._lock = threading.Lock()
        self._pins: dict[str, Pin] = {}
        for file in directory.files(*PIN_ROLES):
            try:
                pin = read_pin(file)
            except JournalDamagedError as error:
                LOG.warning("a kept checkpoint is damaged and cannot be used", error=str(error))
                continue
            former = self._pins.get(pin.checkpoint_id)
            self._pins[pin.checkpoint_id] = pin
            if former is not None and not last_rewind:
                directory.remove(former.file)  # A crash came between its successor and its end.

    def all(self) -> list[Pin]:
        """Return the kept checkpoints, oldest first."""
        with self._lock:
            return sorted(self._pins.values(), key=lambda pin: pin.file.number)

    def uses(self) -> frozenset[tuple[int, str]]:
        """Return the files, by number and role, that must stay."""
        return frozenset().union(*(pin.uses for pin in self.all()))

    def find(self, checkpoint_id: str) -> Pin | None:
        """Return a kept checkpoint, None if there is none of that name."""
        with self._lock:
            return self._pins.get(checkpoint_id)

    def require(self, where: str, checkpoint_id: str) -> Pin:
        """Return a kept checkpoint.

        Raises:
            InvalidRequestError: there is none of that name.
        """
        pin = self.find(checkpoint_id)
        if pin is None:
            known = [each.checkpoint_id for each in self.all()]
            raise InvalidRequestError(
                f"{where}: checkpoint_id must be one of {known}, got {checkpoint_id!r}; prepare it first"
            )
        return pin

    def check_new(self, checkpoint_id: str) -> None:
        """Raise unless a checkpoint of that name may be prepared.

        Raises:
            InvalidRequestError: the name is empty or too long, is that of a committed one, or too many are kept.
        """
        where = "checkpoint_prepare"
        if not 0 < len(checkpoint_id) <= MAX_ID_CHARS:
            raise InvalidRequestError(
                f"{where}: checkpoint_id must have 1 to {MAX_ID_CHARS} characters, got {len(checkpoint_id)}"
            )
        former = self.find(checkpoint_id)
        if former is not None and former.status == "committed":
            raise InvalidRequestError(
                f"{where}: checkpoint_id must not be that of a committed checkpoint, got {checkpoint_id!r}; "
                "release it first or take another name"
            )
        if former is None and len(self.all()) >= MAX_PINS:
            raise InvalidRequestError(
                f"{where}: kept checkpoints must be at most {MAX_PINS}, got one more; release some"
            )

    def add(self, pin: Pin) -> None:
        """Note a checkpoint that was written."""
        with self._lock:
            self._pins[pin.checkpoint_id] = pin

    def commit(self, pin: Pin) -> None:
        """Note for good that what belongs to a checkpoint is durable. Idempotent."""
        if pin.status == "committed":
            return
        file = self._directory.file(pin.file.number, "committed")
        pin.file.path.rename(file.path)
        self._directory.sync_names()
        self.add(replace(pin, file=file))

    def forget(self, pin: Pin) -> None:
        """Forget a checkpoint that is to be deleted, unless another has taken its name."""
        with self._lock:
            if self._pins.get(pin.checkpoint_id) == pin:
                del self._pins[pin.checkpoint_id]


def read_pin(file: JournalFile) -> Pin:
    """Return what a file says about itself.

    Raises:
        JournalDamagedError: it is not as it was written.
    """
    head: r.FileHead | None = None
    uses: set[tuple[int, str]] = set()
    what = "the file ends before its last frame"
    try:
        for each in read_frames(map_file(file.path)):
            if isinstance(each, Damage):
                what = f"at byte {each.offset}: {each.what}"
                break
            if each.kind is Kind.HEADER:
                head = read_head(file.path.name, each)
            elif each.kind is Kind.EXTENTS:
                uses |= {(extent.file, extent.role) for extent in r.decode(each.body, list[r.ExtentRecord])}
            elif each.kind is Kind.END:
                what = ""
    except msgspec.MsgspecError as error:
        what = f"it cannot be understood: {error}"
    if what or head is None:
        raise JournalDamagedError(
            f"journal: the kept checkpoint {file.path} must be as it was written, got: {what or 'no header'}; "
            "delete the file if nobody needs it"
        )
    return Pin(file=file, checkpoint_id=head.checkpoint_id, seq=head.seq, uses=frozenset(uses))
