"""Put and take over TCP with 0, 1 and 2 storage servers, and memcpy of the same bytes, interleaved in one run.

    python -m tools.bench_storage [--rounds 9]

Prints medians and spreads for 64 rows of 4 MiB in milliseconds, and ratios to one warm memcpy and to no storage server.
All processes are on this host: with fewer cores than processes at work it shows what the way over storage servers
costs, not what more hosts bring.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa

from flight.client import QueueClient
from flight.schema import Column, ConsumerSpec, TableSpec

NUM_ROWS, ROW_BYTES = 64, 4 << 20
WARM_UP_ROUNDS = 2
NUM_STORAGE = (0, 1, 2)
ROOT = Path(__file__).resolve().parents[1]


def start(stack: ExitStack, *options: str) -> str:
    """Start a server and return its address."""
    command = [sys.executable, "-m", "flight", "serve", "--port", "0", "--parent-pid", str(os.getpid())]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    stack.callback(process.wait)
    stack.callback(process.kill)
    line = process.stdout.readline() if process.stdout else ""
    return line.removeprefix("listening on ").strip()


def put_and_take(client: QueueClient, rows: pa.Table) -> dict[str, float]:
    """Return seconds of a put and of a take."""
    begin = time.perf_counter()
    client.put("rows", rows)
    put = time.perf_counter()
    lease = client.take("rows", "c", max_rows=rows.num_rows, min_rows=rows.num_rows)
    took = time.perf_counter()
    if lease.table.num_rows != rows.num_rows or lease.table["x"].null_count:
        raise RuntimeError(
            f"bench_storage: take must return all rows with their values, got {lease.table.num_rows}"
        )
    client.ack("rows", "c", lease_id=lease.lease_id)
    return {"put": put - begin, "take": took - put, "all": took - begin}


def measure(stack: ExitStack, rounds: int) -> dict[str, list[float]]:
    """Return seconds of each round by what was measured."""
    values = np.random.default_rng(0).integers(0, 255, NUM_ROWS * ROW_BYTES, dtype=np.uint8)
    offsets = pa.array(np.arange(NUM_ROWS + 1, dtype=np.int32) * ROW_BYTES)
    lists = pa.ListArray.from_arrays(offsets, pa.array(values))
    column = Column(name="x", type=lists.type, meaning="values")
    spec = TableSpec(name="rows", columns=(column,), consumers=(ConsumerSpec(name="c", columns=("x",)),))
    clients = {}
    for number in NUM_STORAGE:
        uri = start(stack, "--no-shared-memory")
        for _ in range(number):
            start(stack, "--storage", uri, "--no-shared-memory")
        client = QueueClient(uri, identity="bench", deadline_s=120.0, shared_memory=False)
        clients[number] = stack.enter_context(client)
        clients[number].create_table(spec)
    found: dict[str, list[float]] = defaultdict(list)
    target = values.copy()
    for turn in range(rounds + WARM_UP_ROUNDS):
        begin = time.perf_counter()
        np.copyto(target, values)
        times = {"memcpy": time.perf_counter() - begin}
        for number, client in clients.items():
            rows = pa.table({"uid": [f"{turn}-{row}" for row in range(NUM_ROWS)], "x": lists})
            times |= {f"{number} {part}": seconds for part, seconds in put_and_take(client, rows).items()}
        if turn >= WARM_UP_ROUNDS:
            for what, seconds in times.items():
                found[what].append(seconds)
    return found


def main() -> None:
    """Start the servers, measure, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    with ExitStack() as stack:
        found = measure(stack, rounds)
    memcpy = statistics.median(found["memcpy"])
    print(f"64 rows x 4 MiB over TCP, {os.cpu_count()} cores, storage servers: {NUM_STORAGE}")
    for what, seconds in found.items():
        middle = statistics.median(seconds)
        part = what.partition(" ")[2]
        ratios = (
            [each / base for each, base in zip(seconds, found[f"0 {part}"], strict=True)] if part else [1.0]
        )
        print(
            f"  {what:8} {middle * 1e3:9.1f} ms  ({min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f})"
            f"  {middle / memcpy:6.2f} memcpy  {statistics.median(ratios):5.2f} of no storage server"
        )
    print(json.dumps({what: statistics.median(seconds) for what, seconds in found.items()}))


if __name__ == "__main__":
    main()
