"""Clients that outlive their server: `python -m tests.kit.journal_worker produce|consume URI TABLE NAME NUM_ROWS LOG`.

Both note each row in LOG once the server has acknowledged it, and try again for as long as it takes to start anew.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from flight.client import QueueClient
from flight.errors import DeadlineExceededError, LeaseLostError, UnavailableError

ROWS_PER_CALL = 3
PATIENCE_S = 60.0
T = TypeVar("T")


def patiently(call: Callable[[], T]) -> T:
    """Repeat a call while no server answers, or none in time."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except (DeadlineExceededError, UnavailableError):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def produce(
    client: QueueClient, table: str, name: str, num_rows: int, note: Callable[[list[str]], None]
) -> None:
    """Put rows, a few at a time."""
    uids = [f"{name}-{number}" for number in range(num_rows)]
    for start in range(0, num_rows, ROWS_PER_CALL):
        some = uids[start : start + ROWS_PER_CALL]
        rows = pa.table({"uid": some, "x": [f"value of {uid}" for uid in some]})
        patiently(lambda rows=rows: client.put(table, rows))
        note(some)


def consume(
    client: QueueClient, table: str, name: str, num_rows: int, note: Callable[[list[str]], None]
) -> None:
    """Take and ack until the end of the table."""
    while True:
        lease = patiently(
            lambda: client.take(table, "reader", max_rows=ROWS_PER_CALL, lease_s=30.0, deadline_s=2.0)
        )
        if lease.status == "sealed":
            return
        uids = lease.table.column("uid").to_pylist()
        if lease.table.column("x").to_pylist() != [f"value of {uid}" for uid in uids]:
            raise ValueError(f"{name}: values must belong to their rows, got {lease.table.to_pylist()}")
        if not uids:
            continue
        try:
            patiently(lambda lease=lease: client.ack(table, "reader", lease_id=lease.lease_id))
        except LeaseLostError:
            continue  # The server died before the ack was written: the rows come again.
        note(uids)


if __name__ == "__main__":
    _, verb, uri, table_name, own_name, count, log = sys.argv
    with (
        Path(log).open("ab", buffering=0) as notes,
        QueueClient(uri, identity=own_name, deadline_s=20.0) as queue,
    ):
        work = {"produce": produce, "consume": consume}[verb]
        work(
            queue,
            table_name,
            own_name,
            int(count),
            lambda uids: notes.write(f"{' '.join(uids)}\n".encode()) and None,
        )
