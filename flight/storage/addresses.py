"""Where a row's values lie, in one number: 22 bits for the owner, 40 for the row there. Pure.

Owners get random numbers that are not used again, so that an address of one who is gone, or of another coordinator's
time, never means somebody else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from flight.errors import InvalidRequestError
from flight.storage.messages import Run

NUMBER_BITS = 40
MAX_OWNER = (1 << 22) - 1
MAX_ROWS = 1 << 22
"""Rows that one list of runs may stand for."""


def pack(owner: int, first: int, num_rows: int) -> pa.Array:
    """Return the addresses of `num_rows` rows from number `first` of an owner."""
    start = (owner << NUMBER_BITS) + first
    return pa.array(np.arange(start, start + num_rows, dtype=np.int64))


def to_numpy(addresses: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return addresses as integers, shape [num_rows]; -1 for a row that has none."""
    return addresses.fill_null(-1).to_numpy()


def owners_of(addresses: np.ndarray) -> np.ndarray:
    """Return the owner of each address; negative for -1."""
    return addresses >> NUMBER_BITS


def numbers_of(addresses: np.ndarray) -> np.ndarray:
    """Return the number of each row at its owner."""
    return addresses & ((1 << NUMBER_BITS) - 1)


def to_runs(numbers: np.ndarray) -> list[Run]:
    """Return numbers as runs, in their order."""
    if not len(numbers):
        return []
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
    counts = np.diff(starts, append=len(numbers))
    return list(zip(numbers[starts].tolist(), counts.tolist(), strict=True))


def from_runs(where: str, runs: Sequence[Run]) -> np.ndarray:
    """Return the numbers that runs stand for, shape [num_rows].

    Raises:
        InvalidRequestError: a number is negative, or there are too many.
    """
    if any(first < 0 or count < 1 for first, count in runs) or sum(count for _, count in runs) > MAX_ROWS:
        raise InvalidRequestError(
            f"{where}: runs must be of numbers from 0 and counts from 1, of at most {MAX_ROWS} rows in all, got others"
        )
    pieces = [np.arange(first, first + count, dtype=np.int64) for first, count in runs]
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)
