"""The files of a journal: their names, the lock, room in reserve, and every call that touches the disk."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import xxhash

from flight.errors import InvalidRequestError, JournalDamagedError

Role = Literal["log", "rows", "state", "prepared", "committed"]
PIN_ROLES: tuple[Role, ...] = ("prepared", "committed")
"""Checkpoints that are kept until somebody releases them."""

MIN_RESERVE_BYTES = 4 << 20
"""Room that is kept back for the decisions and the checkpoint that make room when the disk is full."""

MAX_BUFFERS = 512
"""Buffers of one write; the kernel takes 1024 at most."""

_MARK = struct.Struct("<QQ")


class Disk:
    """The calls that may find the disk full or broken, in one place."""

    def create(self, path: Path) -> int:
        """Return a descriptor of a new empty file."""
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def write(self, descriptor: int, buffers: Sequence[Any]) -> None:
        """Append all buffers; an error may leave some of them behind."""
        left = [memoryview(each).cast("B") for each in buffers if len(each)]
        while left:
            num_bytes = os.writev(descriptor, left[:MAX_BUFFERS])
            while left and num_bytes >= len(left[0]):
                num_bytes -= len(left.pop(0))
            if num_bytes:
                left[0] = left[0][num_bytes:]

    def sync(self, descriptor: int) -> None:
        """Return once all that was written is on the disk."""
        os.fdatasync(descriptor)

    def sync_names(self, descriptor: int) -> None:
        """Return once the names in a directory are on the disk; fdatasync may leave them out."""
        os.fsync(descriptor)

    def free_bytes(self, path: Path) -> int:
        """Return how many bytes could still be written into a directory."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        """Take room for a file."""
        os.posix_fallocate(descriptor, 0, num_bytes)


@dataclass(frozen=True, order=True)
class JournalFile:
    """One numbered file."""

    number: int
    role: Role
    path: Path

    @property
    def num_bytes(self) -> int:
        """Return its size, 0 if it is gone."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0


class JournalDirectory:
    """A directory that one process at a time may use; `close` lets it go."""

    def __init__(self, path: Path, *, create: bool = True, disk: Disk | None = None) -> None:
        """Take the directory.

        Raises:
            InvalidRequestError: it cannot be used, or another process uses it.
        """
        self.path = path
        self.disk = disk or Disk()
        try:
            if create:
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not path.is_dir():
                raise InvalidRequestError(f"journal: must be a directory, got {path}; check the path")
            self._lock = (path / "lock").open("a")
        except OSError as error:
            raise InvalidRequestError(
                f"journal: must be a directory to write into, got {path} ({error})"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise InvalidRequestError(
                f"journal: {path} must be used by one process, got a second one; stop the server that uses it"
            ) from error
        self._mark: int | None = None
        self._numbering = threading.Lock()
        self._next = max((each.number for each in self.files()), default=0) + 1
        for draft in path.glob("*.draft"):
            draft.unlink()

    def close(self) -> None:
        """Let other processes use the directory."""
        if self._mark is not None:
            os.close(self._mark)
        self._lock.close()

    # ---- files ------------------------------------------------------------------------------------------------

    def files(self, *roles: Role) -> list[JournalFile]:
        """Return the files of some roles (all without any), by number."""
        found = []
        for role in roles or get_args(Role):
            for path in self.path.glob(f"*.{role}"):
                if path.stem.isdecimal():
                    found.append(JournalFile(int(path.stem), role, path))
        return sorted(found)

    def num_bytes(self) -> int:
        """Return the bytes of all files, without the reserve."""
        return sum(each.num_bytes for each in self.files())

    def new_file(self, role: Role) -> JournalFile:
        """Return a file that does not exist, with the next number."""
        with self._numbering:
            number, self._next = self._next, self._next + 1
        return self.file(number, role)

    def file(self, number: int, role: Role) -> JournalFile:
        """Return the file of a number."""
        return JournalFile(number, role, self.path / f"{number:010d}.{role}")

    def pin(self, number: int) -> JournalFile:
        """Return the file of a kept checkpoint.

        Raises:
            JournalDamagedError: there is none of that number.
        """
        found = [file for file in self.files(*PIN_ROLES) if file.number == number]
        if not found:
            raise JournalDamagedError(
                f"journal: {self.path} must have the kept checkpoint {number} that a decision names, got none; "
                "run python -m flight fsck on the directory"
            )
        return found[0]

    def remove(self, file: JournalFile) -> None:
        """Delete a file. Idempotent."""
        file.path.unlink(missing_ok=True)

    def sync_names(self) -> None:
        """Return once the names of the files are on the disk."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.disk.sync_names(descriptor)
        finally:
            os.close(descriptor)

    # ---- the mark ---------------------------------------------------------------------------------------------

    def mark_synced(self, seq: int) -> None:
        """Note that all decisions up to `seq` are on the disk; the note itself need not be."""
        if self._mark is None:
            self._mark = os.open(self.path / "synced", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        number = struct.pack("<Q", seq)
        os.pwrite(self._mark, _MARK.pack(seq, xxhash.xxh3_64_intdigest(number)), 0)

    def synced_mark(self) -> int:
        """Return the last decision that is known to have been on the disk; 0 if none is known."""
        try:
            data = (self.path / "synced").read_bytes()
        except FileNotFoundError:
            return 0
        if len(data) != _MARK.size:
            return 0
        seq, checksum = _MARK.unpack(data)
        return seq if checksum == xxhash.xxh3_64_intdigest(data[:8]) else 0

    # ---- the reserve ------------------------------------------------------------------------------------------

    def take_reserve(self, num_bytes: int = MIN_RESERVE_BYTES) -> bool:
        """Keep room back; return whether the disk has it."""
        path = self.path / "reserve"
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < num_bytes:
                self.disk.allocate(descriptor, num_bytes)
            return True
        except OSError:
            path.unlink()
            return False
        finally:
            os.close(descriptor)

    def use_reserve(self) -> None:
        """Give the room that was kept back to the files."""
        (self.path / "reserve").unlink(missing_ok=True)
