"""Rows that are large enough for shared memory, and waiting for what another connection tells."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa

ROW_BYTES = 300_000
DEADLINE_S = 20.0


def pixels(num_rows: int, seed: int = 0) -> pa.Table:
    """Return rows of `ROW_BYTES` random bytes each."""
    values = np.random.default_rng(seed).integers(0, 255, num_rows * ROW_BYTES, dtype=np.uint8)
    offsets = np.arange(num_rows + 1, dtype=np.int32) * ROW_BYTES
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
    return pa.table({"uid": [f"{seed}-{row}" for row in range(num_rows)], "x": lists})


def until(holds: Callable[[], bool]) -> None:
    """Ask until it holds; freeing is told on another connection than asking."""
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
