"""Puts files on the disk for good: what has returned survives the end of the machine, not only of the process."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flight.errors import JournalFullError

FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: OSError) -> bool:
    """Return whether an error says that a disk has no room, the queue's journal included: that may pass."""
    return error.errno in FULL or isinstance(error, JournalFullError)


def append_whole(path: Path, data: bytes) -> None:
    """Append to a file and flush it; if that fails, the file is as it was."""
    with path.open("ab", buffering=0) as file:
        num_bytes = file.seek(0, os.SEEK_END)
        left = memoryview(data)
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            if len(left) < len(data):
                file.truncate(num_bytes)
            raise


def flush(path: Path) -> None:
    """Return once a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """Flush all files and directories below, and the directory itself."""
    for root, _, names in os.walk(directory, topdown=False):
        for name in names:
            flush(Path(root) / name)
        flush(Path(root))


@contextmanager
def whole_or_absent(target: Path) -> Iterator[Path]:
    """Yield a directory to write in, which takes the target's name when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    replaced = target.parent / f".{target.name}.{os.getpid()}.replaced"
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        flush_tree(partial)
        if target.exists():
            target.rename(replaced)
        partial.rename(target)
        flush(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
