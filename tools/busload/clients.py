"""One process with many clients, each a connection and a thread of its own, at full rate until they are told to stop.

    python -m busload.clients URI FIRST COUNT SECONDS

Every few seconds a line of JSON says what was done since the last one: {"ops": {name: {class: count}}, "rows", "bytes",
"errors": [...]}. Client N shares memory with the server if N is even, and uses the socket if it is odd.

    calls        put, take, ack: a call each
    streams      the same over open streams
    subscribers  put, and take what is pushed, whoever has put it
    readers      read rows of a table that stays, by filter and projection; statistics
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from busload.figures import Latencies
from flight.client import QueueClient
from flight.errors import DeadlineExceededError
from flight.memory import keep_freed_memory
from flight.schema import Column, ConsumerSpec, TableSpec
from relax.launch.parent import die_with_parent

ROWS_A_PUT = 16
TOKENS = 512
PIXELS_EVERY = 8
"""Every so many puts carry a tensor of `PIXEL_BYTES` a row, so that large messages are among them."""
PIXEL_BYTES = 64 << 10
LEASE_S = 60.0
WAIT_S = 0.5
"""Longest wait for rows; others may have taken them."""
DEADLINE_S = 60.0
REPORT_S = 2.0
READ_ROWS = 200
CREDIT_ROWS = 64
MAX_ERRORS_TOLD = 5


def tables() -> list[TableSpec]:
    """Return the tables of the test: one for calls and streams each, one that is pushed, one that stays."""
    columns = (
        Column(name="tokens", type=pa.list_(pa.int32()), meaning="token ids", shape="[tokens]"),
        Column(name="logprobs", type=pa.list_(pa.float32()), meaning="of each token", shape="[tokens]"),
        Column(name="reward", type=pa.float64(), meaning="a number to filter by"),
        Column(name="pixels", type=pa.binary(), meaning="bytes of a picture", nullable=True),
    )
    consumer = ConsumerSpec(name="c", columns=("tokens", "logprobs", "reward"))
    return [
        TableSpec(name=name, columns=columns, consumers=(consumer,))
        for name in ("calls", "streams", "subscribers", "readers")
    ]


def rows(
    source: np.random.Generator, names: Iterator[str], *, pixels: bool, count: int = ROWS_A_PUT
) -> pa.Table:
    """Return rows like those of a training run."""
    offsets = pa.array(np.arange(0, (count + 1) * TOKENS, TOKENS, dtype=np.int32))
    tokens = pa.array(source.integers(0, 50_000, count * TOKENS, dtype=np.int32))
    logprobs = pa.array(source.random(count * TOKENS, dtype=np.float32))
    picture = source.bytes(PIXEL_BYTES) if pixels else None
    return pa.table(
        {
            "uid": [next(names) for _ in range(count)],
            "tokens": pa.ListArray.from_arrays(offsets, tokens),
            "logprobs": pa.ListArray.from_arrays(offsets, logprobs),
            "reward": source.random(count),
            "pixels": pa.array([picture] * count, pa.binary()),
        }
    )


class Counts:
    """What the clients of this process have done since it was last told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ops: dict[str, Latencies] = defaultdict(Latencies)
        self._amounts: Counter[str] = Counter()
        self._errors: list[str] = []

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count what is done inside as one operation."""
        began_at = time.monotonic()
        yield
        took_s = time.monotonic() - began_at
        with self._lock:
            self._ops[name].add(took_s)

    def moved(self, table: pa.Table) -> None:
        """Count rows that were put or taken."""
        with self._lock:
            self._amounts["rows"] += table.num_rows
            self._amounts["bytes"] += table.nbytes

    def failed(self, who: str, error: BaseException) -> None:
        """Count an error."""
        with self._lock:
            self._amounts["errors"] += 1
            if len(self._errors) < MAX_ERRORS_TOLD:
                where = traceback.extract_tb(error.__traceback__)[-1]
                self._errors.append(f"{who}: {type(error).__name__}: {error} ({where.name}:{where.lineno})")

    def line(self) -> str:
        """Return all of it as JSON, and begin again."""
        with self._lock:
            facts = {
                "ops": {name: found.counts for name, found in self._ops.items()},
                **{name: self._amounts[name] for name in ("rows", "bytes", "errors")},
                "told": self._errors,
            }
            self._ops.clear()
            self._amounts.clear()
            self._errors = []
        return json.dumps(facts)


class LoadClient:
    """One client and its endless work."""

    def __init__(self, uri: str, number: int, counts: Counts, stop: threading.Event) -> None:
        self.name = f"load-{number}"
        self._client = QueueClient(
            uri, identity=self.name, deadline_s=DEADLINE_S, shared_memory=number % 2 == 0, patience_s=0.0
        )
        self._counts = counts
        self._stop = stop
        self._source = np.random.default_rng(number)
        self._num_puts = 0
        # Half of the clients call, a quarter has streams open, an eighth each is pushed to and reads.
        kinds = (self._calls, self._calls, self._streams, self._calls, self._subscribers, self._streams)
        self._work: Callable[[], None] = (*kinds, self._calls, self._readers)[number // 2 % 8]

    def run(self) -> None:
        """Work until told to stop; an error is counted, and the work begun anew."""
        while not self._stop.is_set():
            try:
                self._work()
            except Exception as error:  # the outermost loop of a client
                self._counts.failed(f"{self.name} {self._work.__name__}", error)
                self._stop.wait(0.1)
        self._client.close()

    def _made(self) -> pa.Table:
        self._num_puts += 1
        first = self._num_puts * ROWS_A_PUT
        names = (f"{self.name}-{at}-{time.monotonic_ns()}" for at in range(first, first + ROWS_A_PUT))
        return rows(self._source, names, pixels=self._num_puts % PIXELS_EVERY == 0)

    def _calls(self) -> None:
        made = self._made()
        with self._counts.timed("put"):
            self._client.put("calls", made)
        self._counts.moved(made)
        with self._counts.timed("take"):
            lease = self._client.take("calls", "c", max_rows=ROWS_A_PUT, lease_s=LEASE_S, deadline_s=WAIT_S)
        if lease.status == "rows":
            self._counts.moved(lease.table)
            with self._counts.timed("ack"):
                self._client.ack("calls", "c", lease_id=lease.lease_id)

    def _streams(self) -> None:
        with self._client.open_put("streams") as puts, self._client.open_take("streams", "c") as takes:
            done = None
            while not self._stop.is_set():
                made = self._made()
                with self._counts.timed("stream put"):
                    puts.put(made)
                self._counts.moved(made)
                with self._counts.timed("stream take"):
                    done = takes.take(max_rows=ROWS_A_PUT, lease_s=LEASE_S, deadline_s=WAIT_S, ack=done)
                if done.status == "rows":
                    self._counts.moved(done.table)
            if done is not None and done.status == "rows":
                takes.ack(done)

    def _subscribers(self) -> None:
        with self._client.subscribe(
            "subscribers", "c", max_rows=ROWS_A_PUT, credit_rows=CREDIT_ROWS, lease_s=LEASE_S
        ) as pushed:
            while not self._stop.is_set():
                made = self._made()
                with self._counts.timed("put"):
                    self._client.put("subscribers", made)
                self._counts.moved(made)
                num_due = made.num_rows
                while num_due > 0 and not self._stop.is_set():
                    try:
                        with self._counts.timed("pushed"):
                            lease = pushed.next_lease(WAIT_S)
                    except DeadlineExceededError:
                        break
                    if lease is None:
                        return
                    self._counts.moved(lease.table)
                    num_due -= lease.table.num_rows
                    with self._counts.timed("pushed ack"):
                        lease.ack()

    def _readers(self) -> None:
        low = float(self._source.random())
        with self._counts.timed("read"):
            found = self._client.read(
                "readers",
                columns=["reward", "tokens"],
                filter={"column": "reward", "op": ">", "value": low},
                max_rows=READ_ROWS,
            )
        self._counts.moved(found)
        with self._counts.timed("stats"):
            self._client.stats("calls")


def main() -> None:
    """Run the clients of this process."""
    uri, first, count, seconds = sys.argv[1], *(float(word) for word in sys.argv[2:5])
    die_with_parent(os.getppid())
    keep_freed_memory()
    counts, stop = Counts(), threading.Event()
    clients = [LoadClient(uri, number, counts, stop) for number in range(int(first), int(first + count))]
    threads = [threading.Thread(target=client.run, name=client.name, daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    ends_at = time.monotonic() + seconds
    while (left_s := ends_at - time.monotonic()) > 0:
        time.sleep(min(REPORT_S, left_s))
        print(counts.line(), flush=True)
    stop.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    print(counts.line(), flush=True)


if __name__ == "__main__":
    main()
