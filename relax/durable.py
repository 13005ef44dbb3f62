"""Puts files on the disk for good: what has returned survives the end of the machine, not only of the process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
