"""The values of a storage server: batches by the numbers of their rows, in memory or spilled. Thread-safe.

Of tables it knows the names only. A number is given once and never again; what it stands for stays until it is freed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import structlog

from flight.data.spill import SpillDirectory
from flight.data.store import Chunk, ColumnStore, gather, joined
from flight.errors import OverloadedError, UnavailableError
from flight.storage import addresses
from flight.storage.messages import Run

LOG = structlog.get_logger("flight.storage")


class ValueStore:
    """`capacity_bytes` bounds memory and disk together, `memory_bytes` what stays in memory if there is a disk."""

    def __init__(
        self,
        *,
        capacity_bytes: int | None = None,
        spill: SpillDirectory | None = None,
        memory_bytes: int = 1 << 30,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._spill = spill
        self._memory_bytes = memory_bytes
        self._store = ColumnStore(1)
        self._held: dict[int, str] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def used_bytes(self) -> int:
        """Return the bytes of all values."""
        return self._store.nbytes

    @property
    def disk_bytes(self) -> int:
        """Return those of them that are on disk."""
        return self._store.disk_nbytes

    def __len__(self) -> int:
        return len(self._held)

    def check_open(self) -> None:
        """Raise unless a batch might find room.

        Raises:
            OverloadedError: it is full now; somebody else may have room.
            UnavailableError: no rows are taken any more.
        """
        with self._lock:
            self._check_room(0)

    def add(self, batch: pa.RecordBatch, table: str = "") -> int:
        """Keep a batch of a table and return the number of its first row. It does not wait: others may have room.

        Raises:
            OverloadedError: there is no room now.
            UnavailableError: no rows are taken any more.
        """
        with self._lock:
            self._check_room(batch.nbytes)
            first = self._next
            self._next += batch.num_rows
            numbers = range(first, self._next)
            self._held.update(dict.fromkeys(numbers, table))
            self._store.add(0, batch, numbers)
            chunks = self._store.overflow(self._memory_bytes) if self._spill is not None else []
        self._move_to_disk(chunks)
        return first

    def find(
        self, schema: pa.Schema, numbers: np.ndarray, row_ids: np.ndarray, *, table: str = ""
    ) -> pa.Table:
        """Return rows that are there: row_id and the columns of `schema`, null where a batch has no such column.

        Rows of other tables than `table` are not there, unless it is empty.
        """
        with self._lock:
            owners = [self._held.get(number) for number in numbers.tolist()]
            is_held = np.fromiter(
                (owner is not None and table in ("", owner) for owner in owners), bool, len(numbers)
            )
            places = self._store.locate(0, numbers[is_held].tolist())
        arrays: list[pa.Array | pa.ChunkedArray] = [pa.array(row_ids[is_held], pa.int64())]
        fields = [pa.field("row_id", pa.int64())]
        for field in schema:
            if field.name == "row_id":
                fields[0] = field
            else:
                arrays.append(gather(places, field.name, field.type))
                fields.append(field)
        return joined(pa.Table.from_arrays(arrays, schema=pa.schema(fields)))

    def free(self, runs: Sequence[Run]) -> None:
        """Forget rows. Idempotent."""
        numbers = addresses.from_runs("storage: free", runs).tolist()
        with self._lock:
            found = [number for number in numbers if number in self._held]
            for number in found:
                del self._held[number]
            self._store.free(found)

    def clear(self) -> None:
        """Forget all rows; numbers go on."""
        with self._lock:
            self._store.free(list(self._held))
            self._held.clear()

    def close(self) -> None:
        """Take no rows any more; what is there stays readable."""
        with self._lock:
            self._is_closed = True

    def _check_room(self, num_bytes: int) -> None:
        if self._is_closed:
            raise UnavailableError("storage: it must take rows, got a put while it leaves; put elsewhere")
        free_bytes = None if self.capacity_bytes is None else self.capacity_bytes - self._store.nbytes
        if free_bytes is not None and (free_bytes <= 0 or num_bytes > free_bytes):
            raise OverloadedError(
                f"storage: values must be at most capacity_bytes {self.capacity_bytes}, got {num_bytes} more than "
                f"{self._store.nbytes}; put elsewhere"
            )

    def _move_to_disk(self, chunks: Sequence[Chunk]) -> None:
        """Write chunks that `overflow` chose; what the disk does not take stays in memory."""
        for chunk in chunks:
            original, mapped = chunk.batch, None
            try:
                if self._spill is not None:
                    [mapped] = self._spill.write([original])
            except OSError as error:
                LOG.warning("cannot write to the spill directory", error=str(error))
            with self._lock:
                self._store.moved(chunk, original, mapped)
