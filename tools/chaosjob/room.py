"""A small disk and a small /dev/shm that only a series sees, so that filling them harms nobody else.

Both are tmpfs of limited size in a mount namespace of the tool's own. Where the kernel lets users make one (`unshare
--user`), no rights are needed; where not, the run lies on the common disk, and faults that fill something are left out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INSIDE = "CHAOS_NAMESPACE"
"""Set in the environment of the tool once it is in a namespace of its own."""
DISK_BYTES = 768 << 20
SHM_BYTES = 64 << 20
TRY_S = 10.0
FILL_AGAIN_S = 0.2
SHM = Path("/dev/shm")


class Room:
    """Where runs lie, and how to leave them no room."""

    def __init__(self, disk: Path, *, is_private: bool) -> None:
        self.disk = disk
        self.is_private = is_private

    @contextmanager
    def filled(self, place: Path) -> Iterator[None]:
        """Leave no byte free in `place` inside the block; what others free meanwhile is taken, too."""
        filler = place / f".filler-{os.getpid()}"
        with filler.open("wb") as file:
            try:
                _take_all(file.fileno())
                yield
            finally:
                filler.unlink()

    def stay_full(self, place: Path, hold_s: float) -> None:
        """Keep `place` full for a time."""
        with self.filled(place):
            ends_at = time.monotonic() + hold_s
            while (left_s := ends_at - time.monotonic()) > 0:
                time.sleep(min(FILL_AGAIN_S, left_s))


def _take_all(descriptor: int) -> None:
    """Write zeros until there is no room."""
    piece = bytes(1 << 20)
    while piece:
        try:
            os.write(descriptor, piece)
        except OSError:
            piece = piece[: len(piece) // 2]


def enter(home: Path) -> Room:
    """Return where runs may lie: on a small disk of their own if the system permits, else in `home`.

    Starts this program anew inside a namespace, once; does not return from the call that does.
    """
    disk = home / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    if INSIDE in os.environ:
        for place, num_bytes in ((disk, DISK_BYTES), (SHM, SHM_BYTES)):
            _mount(place, num_bytes)
        return Room(disk, is_private=True)
    words = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is not None and _works([*words, "mount", "-t", "tmpfs", "chaos", str(disk)]):
        os.execvpe("unshare", [*words, sys.executable, *sys.argv], os.environ | {INSIDE: "1"})
    return Room(disk, is_private=False)


def _mount(place: Path, num_bytes: int) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=1777", "chaos", str(place)], check=True
    )


def _works(words: list[str]) -> bool:
    try:
        return subprocess.run(words, capture_output=True, timeout=TRY_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def save(run_dir: Path, target: Path) -> None:
    """Copy a run out of the room, which goes with the tool, to where it can be looked at."""
    if target.exists():
        shutil.rmtree(target)
    if run_dir.is_dir():
        shutil.copytree(run_dir, target, symlinks=True)
    target.mkdir(parents=True, exist_ok=True)
