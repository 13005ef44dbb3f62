"""Rows of bytes for tables whose values lie with storage servers, and a coordinator that these join."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pyarrow as pa

from flight.client import QueueClient
from flight.schema import Column, ConsumerSpec, TableSpec
from tests.kit.columns import digest
from tests.kit.server import queue_server, storage_server

DEADLINE_S = 20.0
ROW_BYTES = 100_000
LISTS = pa.list_(pa.uint8())
BYTES = Column(name="x", type=LISTS, meaning="bytes")
NUMBER = Column(name="n", type=pa.int64(), meaning="a number")
MORE = Column(name="y", type=LISTS, meaning="more bytes", writer="judge")
CONSUMER = ConsumerSpec(name="c", columns=("n", "x"))


def values(*uids: str) -> pa.Array:
    """Return `ROW_BYTES` random bytes for each uid, always the same ones."""
    flat = [np.random.default_rng(list(uid.encode())).integers(0, 255, ROW_BYTES, np.uint8) for uid in uids]
    offsets = np.arange(len(uids) + 1, dtype=np.int32) * ROW_BYTES
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(np.concatenate([*flat, np.empty(0, np.uint8)]))
    )


def rows(*uids: str, group_id: str | None = None) -> pa.Table:
    """Return one row a uid."""
    found = pa.table({"uid": list(uids), "n": pa.array(range(len(uids)), pa.int64()), "x": values(*uids)})
    return found if group_id is None else found.append_column("group_id", pa.array([group_id] * len(uids)))


def names(tag: str, count: int = 4) -> list[str]:
    """Return so many uids."""
    return [f"{tag}-{number}" for number in range(count)]


def check(table: pa.Table, column: str = "x") -> None:
    """Assert that every row has the bytes that belong to its uid."""
    assert digest(table[column]) == digest(values(*table["uid"].to_pylist()))


def spec(name: str = "rows", **changes) -> TableSpec:
    """Return a table of numbers and bytes with one fifo consumer."""
    return TableSpec(**{"name": name, "columns": (NUMBER, BYTES, MORE), "consumers": (CONSUMER,)} | changes)


def until(holds: Callable[[], bool]) -> None:
    """Ask until it holds."""
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.02)


class Stage:
    """A coordinator of one test's own; `stack` ends what was started."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.uri, _ = stack.enter_context(queue_server())

    def storage(self, *options: str) -> tuple[str, subprocess.Popen[str]]:
        """Let one more storage server join."""
        return self._stack.enter_context(storage_server(self.uri, *options))

    def client(self) -> QueueClient:
        """Return a client that uses sockets only."""
        return self._stack.enter_context(
            QueueClient(self.uri, identity="test", deadline_s=DEADLINE_S, shared_memory=False)
        )


def rows_at(client: QueueClient) -> dict[str, int]:
    """Return how many rows each storage server has, by location."""
    return {each["location"]: each["num_rows"] for each in client.storage_servers()}
