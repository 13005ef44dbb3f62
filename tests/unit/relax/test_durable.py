"""Files that are on the disk for good, and disks that have no room."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flight.errors import JournalFullError
from relax.durable import append_whole, is_full


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let writes beyond that size fail inside the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_append_whole_leaves_nothing_of_what_did_not_fit(tmp_path):
    """A write that fails half-way is taken back; the next one goes on where the file ended."""
    path = tmp_path / "log"
    append_whole(path, b"first\n")
    with files_of_at_most(10), pytest.raises(OSError, match="File too large"):
        append_whole(path, b"too much for it\n")
    append_whole(path, b"last\n")
    assert path.read_bytes() == b"first\nlast\n"


def test_is_full_tells_what_may_pass():
    """No room, on this disk or the journal's; not a disk that is broken."""
    assert is_full(OSError(errno.ENOSPC, "no room"))
    assert is_full(JournalFullError("journal: no room"))
    assert not is_full(OSError(errno.EIO, "broken"))
    with pytest.raises(OSError, match="No space left") as caught:
        append_whole(Path("/dev/full"), b"x")
    assert is_full(caught.value)
