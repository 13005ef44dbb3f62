"""The systems that need nothing but this repo: ours, bare Flight, ZeroMQ, memcpy. One small class each.

A system is made in a worker process with the workload mapped and starts what it needs. What it does before `put` and
after `take` is not timed: building the form in which it likes its data best, fresh uids, making room again.
"""

from __future__ import annotations

import inspect
import json
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa

from busbench import workloads as w
from busbench.processes import start_server, stop_server

BATCH_BYTES = 2 << 20
"""Batch size of bare Flight; 256 KB to 4 MB are its best."""

FRAME_BYTES = 4 << 20
MAX_TABLE_BYTES = 4 << 30
LEASE_S = 300.0


class System(Protocol):
    """What a worker does with a system; `prepare`, `put`, `take` come in this order, over and over."""

    def prepare(self) -> None:
        """Get the next put ready, and room for it."""

    def put(self) -> None:
        """Hand the workload over; return when it is safe there."""

    def take(self) -> int:
        """Fetch it, read a byte of every page, finish it; return the sum of these bytes."""

    def digest(self) -> str:
        """Return the digest of what the last take fetched."""

    def client(self, name: str) -> System:
        """Return another client of the same server."""

    def server_pids(self) -> list[int]:
        """Return the processes that hold what was put."""

    def close(self) -> None:
        """Stop what was started."""


class Memcpy:
    """One copy of all buffers into memory that is there already: the limit. Taking is touching."""

    def __init__(self, workload: w.Workload) -> None:
        self._workload = workload
        arrays = [table.column(name) for table in workload.tables.values() for name in table.column_names]
        self._sources = [piece for column in arrays for part in w.column_values(column) for piece in part]
        self._targets = [np.zeros_like(source) for source in self._sources]

    def prepare(self) -> None:
        """Nothing to do."""

    def put(self) -> None:
        """Copy."""
        for source, target in zip(self._sources, self._targets, strict=True):
            np.copyto(target, source)

    def take(self) -> int:
        """Read a byte of every page."""
        return sum(w.touch(target) for target in self._targets)

    def digest(self) -> str:
        """Return the digest of the copies."""
        pieces = iter(self._targets)
        copied = {}
        for part, table in self._workload.tables.items():
            for name in table.column_names:
                lengths, values = w.column_values(table.column(name))
                copied[f"{part}.{name}"] = ([next(pieces) for _ in lengths], [next(pieces) for _ in values])
        return w.digest(copied)

    def client(self, name: str) -> Memcpy:
        """Return another one."""
        return Memcpy(self._workload)

    def server_pids(self) -> list[int]:
        """Return none: there is no server."""
        return []

    def close(self) -> None:
        """Nothing to do."""


def queue_options(shared_memory: bool) -> dict[str, Any] | None:
    """Return the options of `QueueClient` for a path; None if it does not have that path."""
    from flight.client import QueueClient

    if "shared_memory" not in inspect.signature(QueueClient.__init__).parameters:
        return None if shared_memory else {}
    return {"shared_memory": shared_memory}


class Queue:
    """Ours: `QueueClient` against `python -m flight serve`. A take is a take, a look at every page, and an ack.

    Media that rows share go into a table of their own, once a group; the reader reads them by uid.
    """

    shared_memory = False

    def __init__(self, workload: w.Workload, address: str = "", name: str = "bench") -> None:
        from flight.client import QueueClient
        from flight.memory import keep_freed_memory

        keep_freed_memory()
        options = queue_options(self.shared_memory)
        if options is None:
            raise RuntimeError("flight has no such path yet")
        self._process = None
        if not address:
            self._process, address = start_server(["-m", "flight", "serve", "--port", "0"], "listening on ")
        self._address = address
        self._name = name
        self._workload = workload
        self._client = QueueClient(address, identity=name, deadline_s=120.0, **options)
        self._round = 0
        self._ready: dict[str, pa.Table] = {}
        self._taken: dict[str, pa.Table] = {}
        if self._process is not None:
            for part, table in workload.tables.items():
                self._client.create_table(_spec(part, table))

    def prepare(self) -> None:
        """Give the rows fresh uids; groups as the workload has them."""
        self._round += 1
        prefix = f"{self._name}/{self._round}"
        self._taken = {}
        for part, table in self._workload.tables.items():
            uids = pa.array([f"{prefix}/{row}" for row in range(table.num_rows)])
            self._ready[part] = table.append_column("uid", uids)
        if self._workload.media is not None:
            groups = self._ready[w.MEDIA].column("uid").take(self._workload.rows.column(w.GROUP))
            self._ready[w.ROWS] = self._ready[w.ROWS].append_column("group_id", groups)

    def put(self) -> None:
        """Put media, then rows."""
        for part in reversed(self._ready):
            self._client.put(part, self._ready[part])

    def take(self) -> int:
        """Take all rows, read their media, touch, and acknowledge both."""
        num_rows = self._workload.rows.num_rows
        lease = self._client.take(
            w.ROWS, "reader", max_rows=num_rows, min_rows=num_rows, lease_s=LEASE_S, deadline_s=60.0
        )
        if lease.table.num_rows != num_rows:
            raise RuntimeError(f"take: rows must be {num_rows}, got {lease.table.num_rows} ({lease.status})")
        self._taken = {w.ROWS: lease.table}
        if self._workload.media is not None:
            uids = list(dict.fromkeys(lease.table.column("group_id").to_pylist()))
            self._taken[w.MEDIA] = self._client.read(w.MEDIA, uids=uids)
            self._client.ack(w.MEDIA, "reader", uids=uids)
        total = sum(w.touch_table(table) for table in self._taken.values())
        self._client.ack(w.ROWS, "reader", lease_id=lease.lease_id)
        return total

    def fill(self, num_rows: int) -> None:
        """Put rows that stay, so that the table has `num_rows` of them."""
        step = 8192
        for start in range(0, num_rows, step):
            count = min(step, num_rows - start)
            self._client.put(
                w.ROWS,
                pa.table(
                    {
                        name: _repeat(self._workload.rows.column(name), count)
                        for name in self._workload.rows.column_names
                    }
                    | {"uid": [f"fill/{row}" for row in range(start, start + count)]}
                ),
            )

    def digest(self) -> str:
        """Return the digest of what was taken."""
        names = {part: table.column_names for part, table in self._workload.tables.items()}
        return w.table_digest(self._taken, names)

    def client(self, name: str) -> Self:
        """Return another client of the same server."""
        return type(self)(self._workload, self._address, name)

    def server_pids(self) -> list[int]:
        """Return the server."""
        return [self._process.pid] if self._process is not None else []

    def close(self) -> None:
        """Close the client; stop the server if it is ours."""
        self._client.close()
        if self._process is not None:
            stop_server(self._process)


class SharedQueue(Queue):
    """Ours over shared memory."""

    shared_memory = True


class StreamQueue(Queue):
    """Ours over open streams: a take finishes the rows of the take before in the same message."""

    shared_memory = True

    def __init__(self, workload: w.Workload, address: str = "", name: str = "bench") -> None:
        super().__init__(workload, address, name)
        self._puts = {part: self._client.open_put(part) for part in workload.tables}
        self._takes = self._client.open_take(w.ROWS, "reader")
        self._last: Any = None

    def put(self) -> None:
        """Put media, then rows."""
        for part in reversed(self._ready):
            self._puts[part].put(self._ready[part])

    def take(self) -> int:
        """Take all rows, acknowledging those of the last time, and touch them; without media."""
        num_rows = self._workload.rows.num_rows
        lease = self._takes.take(
            max_rows=num_rows, min_rows=num_rows, lease_s=LEASE_S, deadline_s=60.0, ack=self._last
        )
        if lease.table.num_rows != num_rows:
            raise RuntimeError(f"take: rows must be {num_rows}, got {lease.table.num_rows} ({lease.status})")
        self._last = lease
        self._taken = {w.ROWS: lease.table}
        return w.touch_table(lease.table)

    def close(self) -> None:
        """Close the streams, then all else."""
        for stream in (*self._puts.values(), self._takes):
            stream.close()
        super().close()


def _repeat(column: pa.ChunkedArray, count: int) -> pa.Array:
    return column.combine_chunks().take(pa.array(np.zeros(count, np.int64)))


def _spec(part: str, table: pa.Table) -> Any:
    from flight.schema import Column, ConsumerSpec, TableSpec

    return TableSpec(
        name=part,
        columns=tuple(
            Column(name=column.name, type=column.type, meaning="values of the benchmark")
            for column in table.schema
        ),
        consumers=(
            ConsumerSpec(
                name="reader",
                columns=tuple(table.column_names),
                sampler="keyed" if part == w.MEDIA else "fifo",
            ),
        ),
        capacity_rows=4_000_000,
        capacity_bytes=MAX_TABLE_BYTES,
    )


class BareFlight:
    """pyarrow Flight without a queue: DoPut and DoGet in batches of its best size, the client options of ours."""

    def __init__(self, workload: w.Workload, address: str = "", name: str = "bench") -> None:
        import pyarrow.flight as paflight

        from flight.memory import keep_freed_memory

        keep_freed_memory()
        self._flight = paflight
        self._process = None
        if not address:
            self._process, address = start_server(["-m", "busbench.servers", "flight"], "listening on ")
        self._address = address
        self._name = name
        self._workload = workload
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.max_frame_size", 1 << 20)]
        self._client = paflight.FlightClient(address, generic_options=options)
        self._batches = {part: _cut(table) for part, table in workload.tables.items()}
        self._taken: dict[str, pa.Table] = {}

    def prepare(self) -> None:
        """Let go of what was taken."""
        self._taken = {}

    def put(self) -> None:
        """One DoPut a table."""
        for part, batches in self._batches.items():
            descriptor = self._flight.FlightDescriptor.for_path(f"{self._name}/{part}")
            writer, _ = self._client.do_put(descriptor, batches[0].schema)
            for batch in batches:
                writer.write_batch(batch)
            writer.close()

    def take(self) -> int:
        """One DoGet a table."""
        for part in self._batches:
            reader = self._client.do_get(self._flight.Ticket(f"{self._name}/{part}"))
            self._taken[part] = pa.Table.from_batches([chunk.data for chunk in reader], reader.schema)
        return sum(w.touch_table(table) for table in self._taken.values())

    def digest(self) -> str:
        """Return the digest of what was taken."""
        return w.table_digest(self._taken, {part: table.column_names for part, table in self._taken.items()})

    def client(self, name: str) -> BareFlight:
        """Return another client of the same server."""
        return BareFlight(self._workload, self._address, name)

    def server_pids(self) -> list[int]:
        """Return the server."""
        return [self._process.pid] if self._process is not None else []

    def close(self) -> None:
        """Close the client; stop the server if it is ours."""
        self._client.close()
        if self._process is not None:
            stop_server(self._process)


def _cut(table: pa.Table) -> list[pa.RecordBatch]:
    rows = max(1, table.num_rows * BATCH_BYTES // max(table.nbytes, 1))
    return table.to_batches(max_chunksize=rows)


class ZeroMq:
    """Raw frames over TCP to another process and back, without a copy where libzmq allows it."""

    def __init__(self, workload: w.Workload, address: str = "", name: str = "bench") -> None:
        import zmq

        self._process = None
        if not address:
            self._process, address = start_server(["-m", "busbench.servers", "zmq"], "listening on ")
        self._address = address
        self._name = name.encode()
        self._workload = workload
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.connect(address)
        self._frames: list[Any] = []
        self._header: list[tuple[str, bool, str, int]] = []
        self._taken: list[Any] = []
        for part, table in workload.tables.items():
            for column in table.column_names:
                lengths, values = w.column_values(table.column(column))
                for is_values, pieces in ((False, lengths), (True, values)):
                    self._add(f"{part}.{column}", is_values, pieces)

    def _add(self, column: str, is_values: bool, pieces: list[Any]) -> None:
        for piece in pieces:
            step = FRAME_BYTES // piece.itemsize
            frames = [piece[start : start + step] for start in range(0, len(piece), step)]
            self._header.append((column, is_values, piece.dtype.str, len(frames)))
            self._frames += frames

    def prepare(self) -> None:
        """Let go of what was taken."""
        self._taken = []

    def put(self) -> None:
        """Send all frames; the server says ok."""
        header = json.dumps(self._header).encode()
        self._socket.send_multipart([b"put", self._name, header, *self._frames], copy=False)
        self._receive()

    def take(self) -> int:
        """Ask for the frames."""
        self._socket.send_multipart([b"take", self._name])
        self._taken = self._receive()
        return sum(w.touch(frame.buffer) for frame in self._taken[1:])

    def _receive(self) -> list[Any]:
        if not self._socket.poll(60_000):
            raise RuntimeError(f"{self._address} must answer in 60 s, got nothing")
        return self._socket.recv_multipart(copy=False)

    def digest(self) -> str:
        """Return the digest of what was taken."""
        frames = iter(self._taken[1:])
        columns: dict[str, tuple[list[Any], list[Any]]] = {}
        for column, is_values, dtype, num_frames in json.loads(self._taken[0].bytes):
            pieces = [np.frombuffer(next(frames).buffer, dtype) for _ in range(num_frames)]
            columns.setdefault(column, ([], []))[is_values].extend(pieces)
        return w.digest(columns)

    def client(self, name: str) -> ZeroMq:
        """Return another client of the same server."""
        return ZeroMq(self._workload, self._address, name)

    def server_pids(self) -> list[int]:
        """Return the server."""
        return [self._process.pid] if self._process is not None else []

    def close(self) -> None:
        """Close the socket; stop the server if it is ours."""
        self._taken = []
        self._socket.close(linger=0)
        self._context.term()
        if self._process is not None:
            stop_server(self._process)
