"""A directory on disk for values that memory has no room for. It knows no tables.

A file lives as long as its memory map: it is unlinked as soon as it is mapped, so that the disk is free again when the
last array that looks into it is gone, and also when the server is killed. What a server leaves that dies between the
two steps is removed by the next one that starts in the same directory.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from flight.errors import InvalidRequestError

RETRY_S = 5.0
"""Seconds after a failed write, a full disk say, before the next is tried."""

FILE_BYTES = 32 << 20
"""Batches that go to disk together are written into files of about this size."""


class SpillDirectory:
    """A directory of this server's own under `root`; only one thread need not use it at a time."""

    def __init__(self, root: Path) -> None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            _remove_left_overs(root)
            self.path = Path(tempfile.mkdtemp(prefix="flight-", dir=root))
            self._lock = (self.path / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InvalidRequestError(
                f"serve: spill-dir must be a directory to write into, got {root} ({error})"
            ) from error

    def write(self, batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
        """Write batches of one schema into a file and return them as they lie there.

        Raises:
            OSError: the disk is full or broken; nothing is left behind.
        """
        descriptor, name = tempfile.mkstemp(suffix=".arrow", dir=self.path)
        path = Path(name)
        try:
            with open(descriptor, "wb") as file, pa.ipc.new_file(file, batches[0].schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            reader = pa.ipc.open_file(pa.memory_map(name))
            return [reader.get_batch(index) for index in range(reader.num_record_batches)]
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the directory. Values that are mapped stay readable."""
        self._lock.close()
        shutil.rmtree(self.path, ignore_errors=True)


def _remove_left_overs(root: Path) -> None:
    """Remove the directories of servers that are gone: nobody holds their locks."""
    for lock in root.glob("flight-*/lock"):
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(lock.parent, ignore_errors=True)
