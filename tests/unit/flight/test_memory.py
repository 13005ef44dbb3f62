"""Freed memory is used again: counted in page faults, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.server import REPOSITORY

PROGRAM = """
import ctypes, resource, sys
from flight.memory import keep_freed_memory

if not all(keep_freed_memory() for _ in range(2)):
    sys.exit("no switch")
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
size, before = 4 << 20, 0
for turn in range(6):
    blocks = [c.malloc(size) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks:
        c.free(block)
    before = before or resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_freed_blocks_of_some_megabytes_are_used_again():
    """Five times 8 blocks of 4 MB need hardly a page beyond those of the first time; else it is 1024 a block."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=60,
        check=False,
    )
    if "no switch" in done.stderr:
        pytest.skip("the C library of this system has no mallopt")
    assert done.stderr == ""
    assert int(done.stdout) < 2048
