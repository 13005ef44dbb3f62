"""Put and take of the same rows over shared memory and over TCP, and memcpy of their bytes, interleaved in one run.

    python -m tools.bench_shared_memory [--rounds 9]

Prints, for 64 rows of 4 MiB and 512 rows of 8 KB, medians and spreads in milliseconds, and ratios to one warm memcpy.
Client and server are two processes; what was taken is touched once a page. The arena is warm: two rounds go before.
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
from pathlib import Path

import numpy as np
import pyarrow as pa

from flight.client import QueueClient
from flight.schema import Column, ConsumerSpec, TableSpec

PAGE_BYTES = 4096
WARM_UP_ROUNDS = 2
ROOT = Path(__file__).resolve().parents[1]
WORKLOADS = {"64 rows x 4 MiB": (64, 4 << 20, pa.uint8()), "512 rows x 8 KB": (512, 2048, pa.int32())}


def rows_of(num_rows: int, length: int, kind: pa.DataType) -> tuple[np.ndarray, pa.Array]:
    """Return random values and the lists that they are."""
    values = np.random.default_rng(0).integers(0, 100, num_rows * length).astype(kind.to_pandas_dtype())
    offsets = np.arange(num_rows + 1, dtype=np.int32) * length
    return values, pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def put_and_take(client: QueueClient, table: str, rows: pa.Table) -> dict[str, float]:
    """Return seconds of a put, of a take, and of touching each page of what was taken."""
    start = time.perf_counter()
    client.put(table, rows)
    put = time.perf_counter()
    lease = client.take(table, "c", max_rows=rows.num_rows, min_rows=rows.num_rows)
    took = time.perf_counter()
    for chunk in lease.table["x"].chunks:
        first, last = chunk.offsets[0].as_py(), chunk.offsets[-1].as_py()
        chunk.values.to_numpy()[first:last].view(np.uint8)[::PAGE_BYTES].sum()
    touched = time.perf_counter()
    client.ack(table, "c", lease_id=lease.lease_id)
    return {"put": put - start, "take": took - put, "touch": touched - took, "all": touched - start}


def measure(uri: str, name: str, rounds: int) -> dict[str, list[float]]:
    """Return seconds of each round by what was measured."""
    num_rows, length, kind = WORKLOADS[name]
    values, lists = rows_of(num_rows, length, kind)
    table = f"rows_{num_rows}"
    column = Column(name="x", type=lists.type, meaning="values")
    spec = TableSpec(name=table, columns=(column,), consumers=(ConsumerSpec(name="c", columns=("x",)),))
    found: dict[str, list[float]] = defaultdict(list)
    target = values.copy()
    with (
        QueueClient(uri, identity="shared", deadline_s=120.0) as shared,
        QueueClient(uri, identity="tcp", deadline_s=120.0, shared_memory=False) as tcp,
    ):
        shared.create_table(spec)
        for number in range(rounds + WARM_UP_ROUNDS):
            start = time.perf_counter()
            np.copyto(target, values)
            times = {"memcpy": time.perf_counter() - start}
            for path, client in (("shared", shared), ("tcp", tcp)):
                uids = [f"{number}-{path}-{row}" for row in range(num_rows)]
                rows = pa.table({"uid": uids, "x": lists})
                taken = put_and_take(client, table, rows)
                times |= {f"{path} {part}": seconds for part, seconds in taken.items()}
            if number >= WARM_UP_ROUNDS:
                for what, seconds in times.items():
                    found[what].append(seconds)
    return found


def main() -> None:
    """Start a server, measure, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    command = [sys.executable, "-m", "flight", "serve", "--port", "0", "--parent-pid", str(os.getpid())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        uri = process.stdout.readline().removeprefix("listening on ").strip() if process.stdout else ""
        summary = {}
        for name in WORKLOADS:
            found = measure(uri, name, rounds)
            memcpy = statistics.median(found["memcpy"])
            print(name)
            for what, seconds in found.items():
                middle = statistics.median(seconds)
                print(
                    f"  {what:14} {middle * 1e3:9.2f} ms  ({min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f})"
                    f"  {middle / memcpy:7.2f} memcpy"
                )
            summary[name] = {what: statistics.median(seconds) for what, seconds in found.items()}
        print(json.dumps(summary))
    finally:
        process.terminate()
        process.communicate(timeout=10)


if __name__ == "__main__":
    main()
