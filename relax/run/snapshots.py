"""Which published weights are kept, and where they lie: under the run's directory, or in shared memory. No torch.

With `weights.where=shm` the run's `weights` is a link to a directory in shared memory, which is locked by whoever made
it: one that nobody locks is of a run that was killed, and the next run removes it. Files of either kind go with the
run's directory or with its end.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from relax.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
LOCK_FILE = "lock"
ATTEMPTS = 10


def surplus(versions: Sequence[int], keep: int, pinned: Collection[int] = ()) -> list[int]:
    """Return which of the published versions, oldest first, are to be deleted: all but the newest and the pinned."""
    return [version for version in versions[: max(0, len(versions) - keep)] if version not in pinned]


def weights_dir(run_dir: Path) -> Path:
    """Return where snapshots of a run are published, and found."""
    return run_dir / "weights"


@contextmanager
def weights_home(run_dir: Path, where: str, root: Path = SHARED_MEMORY) -> Iterator[None]:
    """Make the place of the snapshots; when the block ends, what lies in shared memory is gone.

    Args:
        run_dir: Of the run, for which the caller has it alone.
        where: `disk` or `shm`.
        root: Directory of the machine's shared memory.

    Raises:
        ConfigError: there is no shared memory.
    """
    link = weights_dir(run_dir)
    if link.is_symlink():  # of a run that was killed, or of one that had another place
        link.unlink()
    if root.is_dir():
        remove_abandoned(root)
    if where == "disk":
        yield
        return
    if not root.is_dir():
        raise ConfigError(
            f"weights.where: shm needs shared memory at {root}, got none; set weights.where=disk"
        )
    shutil.rmtree(link, ignore_errors=True)
    with _locked(_shared_directory(run_dir, root)) as directory:
        link.symlink_to(directory)
        try:
            yield
        finally:
            link.unlink(missing_ok=True)
            shutil.rmtree(directory, ignore_errors=True)


def remove_abandoned(root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's directories of runs that are not there any more, and return them."""
    gone = []
    for lock in root.glob(f"relax-{os.getuid()}-*/{LOCK_FILE}"):
        with suppress(OSError), lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
            gone.append(lock.parent)
    return gone


def _shared_directory(run_dir: Path, root: Path) -> Path:
    told = hashlib.blake2b(str(run_dir.resolve()).encode(), digest_size=8).hexdigest()
    return root / f"relax-{os.getuid()}-{told}"


@contextmanager
def _locked(directory: Path) -> Iterator[Path]:
    """Have an empty directory that nobody takes for an abandoned one."""
    for _ in range(ATTEMPTS):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
        path = directory / LOCK_FILE
        with path.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Between the two lines above another run may have taken it for abandoned.
            if path.exists() and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                yield directory
                return
    raise ConfigError(
        f"weights.where: {directory} must stay, got one that others remove; set weights.where=disk"
    )
