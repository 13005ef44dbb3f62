"""Puts files on the disk for good: what has returned survives the end of the machine, not only of the process."""

from __future__ import annotations

import os
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
