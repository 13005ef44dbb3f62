"""Producers and consumers as processes of their own, made to be killed: `python -m tests.kit.queue_worker ...`.

produce URI TABLE INDEX NUM_ROWS       puts rows p{INDEX}-{k}; a successor begins anew with the same uids
consume URI TABLE CONSUMER LOG         takes and acks until the end; notes what it takes, then what it has acked
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyarrow as pa

from flight.client import QueueClient
from flight.errors import LeaseLostError

ROWS_PER_PUT = 4
LEASE_S = 1.0


def produce(uri: str, table: str, index: str, num_rows: str) -> None:
    """Put all rows of one producer, a few at a time."""
    uids = [f"p{index}-{number}" for number in range(int(num_rows))]
    with QueueClient(uri, identity=f"producer-{index}", deadline_s=20.0) as client:
        for start in range(0, len(uids), ROWS_PER_PUT):
            chunk = uids[start : start + ROWS_PER_PUT]
            client.put(table, pa.table({"uid": chunk, "x": [f"value of {uid}" for uid in chunk]}))


def consume(uri: str, table: str, consumer: str, log: str) -> None:
    """Take and ack; a line is one write, so that a kill leaves whole lines."""
    with (
        Path(log).open("ab", buffering=0) as notes,
        QueueClient(uri, identity=f"consumer-{os.getpid()}", deadline_s=20.0) as client,
    ):
        while True:
            lease = client.take(table, consumer, max_rows=ROWS_PER_PUT, lease_s=LEASE_S, deadline_s=5.0)
            if lease.status == "sealed":
                return
            uids = lease.table.column("uid").to_pylist()
            if lease.table.column("x").to_pylist() != [f"value of {uid}" for uid in uids]:
                raise ValueError(f"values must belong to their rows, got {lease.table.to_pylist()}")
            if uids:
                notes.write(f"taken {' '.join(uids)}\n".encode())
                try:
                    client.ack(table, consumer, lease_id=lease.lease_id)
                except LeaseLostError:
                    continue
                notes.write(f"acked {' '.join(uids)}\n".encode())


if __name__ == "__main__":
    {"produce": produce, "consume": consume}[sys.argv[1]](*sys.argv[2:])
