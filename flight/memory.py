"""How the C library of this process treats memory that was freed. It holds no memory itself.

A message of some megabytes is memory of its own. glibc gives such memory back to the kernel as soon as it is freed and
asks for new pages for the next message, and making and clearing those costs as much as the transfer: a client that
takes batches of 4 MB needs half of the CPU time once its process keeps what it freed (glibc 2.36, pyarrow 26).
"""

from __future__ import annotations

import ctypes

KEPT_BYTES = 1 << 30
"""Freed memory that the process may keep for the next message."""

MAPPED_FROM_BYTES = 32 << 20
"""From this size on a block is mapped by itself and given back when it is freed; glibc takes no larger value."""

NUM_ARENAS = 2
"""Heaps that the threads of a process share. By default there are eight a core, each with freed memory of its own, and
under 64 clients a server grows for more than ten minutes by blocks that lie free in one or another."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3)."""


def keep_freed_memory() -> bool:
    """Let this process keep up to `KEPT_BYTES` of freed memory, in few heaps; return whether its C library can.

    For the start of a program that moves rows, before its threads start: it is a matter of the whole process, so no
    class of this package does it by itself. Idempotent. Without it all works, with more CPU time for large batches.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wishes = ((_TRIM_THRESHOLD, KEPT_BYTES), (_MMAP_THRESHOLD, MAPPED_FROM_BYTES), (_ARENA_MAX, NUM_ARENAS))
    granted = [bool(mallopt(parameter, value)) for parameter, value in wishes]
    return all(granted)
