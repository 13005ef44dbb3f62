"""The copies that docs/architecture.md names, and no others: by the addresses of values and by what Arrow allocates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from flight.broker import Broker, ReadRequest
from flight.client import QueueClient
from flight.client.views import numpy_views
from flight.schema import Column, ConsumerSpec, TableSpec
from flight.server import QueueServer
from flight.shared.host import SharedMemoryHost

SHAPE = (64, 8, 8)
ROW_BYTES = 64 * 8 * 8
NUM_ROWS = 512
SPEC = TableSpec(
    name="rows",
    columns=(Column(name="x", type=pa.list_(pa.uint8()), meaning="routing"),),
    consumers=(ConsumerSpec(name="reader", columns=("x",)), ConsumerSpec(name="other", columns=("x",))),
)


def rows(num_rows: int = NUM_ROWS) -> pa.Table:
    """Return rows of `ROW_BYTES` each."""
    values = np.arange(num_rows * ROW_BYTES, dtype=np.uint32).astype(np.uint8)
    offsets = np.arange(num_rows + 1, dtype=np.int32) * ROW_BYTES
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
    return pa.table({"uid": [f"r{row}" for row in range(num_rows)], "x": lists})


@contextmanager
def serving(host: SharedMemoryHost | None = None) -> Iterator[tuple[Broker, QueueClient]]:
    """Serve the table in this process, so that both ends can be looked at."""
    broker = Broker()
    server = QueueServer("grpc://127.0.0.1:0", broker, tables=[SPEC], shared=host)
    uri = f"grpc://127.0.0.1:{server.port}"
    try:
        with QueueClient(uri, identity="test", shared_memory=host is not None) as client:
            yield broker, client
    finally:
        server.stop(5.0)
        server.shutdown()


def address(table: pa.Table) -> int:
    """Return where the values of the first row lie."""
    return numpy_views(table["x"], SHAPE)[0].__array_interface__["data"][0]


def test_shared_memory_is_written_once_and_read_where_it_was_written(tmp_path):
    """Server and readers look at one and the same bytes of the arena, under any shape; Arrow allocates no values."""
    host = SharedMemoryHost(64 << 20, root=tmp_path / "shared")
    with serving(host) as (broker, client):
        sent = rows()
        before = pa.total_allocated_bytes()
        client.put("rows", sent)
        first, second = (client.take("rows", name, max_rows=NUM_ROWS).table for name in ("reader", "other"))
        assert pa.total_allocated_bytes() - before < sent.nbytes / 8
        assert address(first) == address(second)
        place = address(first) - client._shared._guest._readable.address
        assert address(broker.read("rows", ReadRequest())) - host._buffer.address == place
        [view] = numpy_views(first["x"], SHAPE)
        assert view.shape == (NUM_ROWS, *SHAPE)
        assert view.tobytes() == sent["x"].chunk(0).values.to_numpy().tobytes()
        assert not view.flags.writeable


def test_put_over_the_socket_keeps_a_large_message_and_copies_a_small_one():
    """What fills its message stays there, so that Arrow allocates nothing for it; the rest is copied, once."""
    with serving() as (broker, client):
        large, small = rows(), rows(16)
        before = pa.total_allocated_bytes()
        client.put("rows", large)
        assert pa.total_allocated_bytes() - before < large.nbytes / 8
        client.truncate_table("rows")
        before = pa.total_allocated_bytes()
        client.put("rows", small)
        assert small.nbytes <= pa.total_allocated_bytes() - before < 1.5 * small.nbytes
        assert broker.size("rows")[1] <= 1.1 * small.nbytes


def test_take_over_the_socket_serves_what_is_kept_without_a_copy_of_it():
    """The server sends slices of what it keeps: its table looks at the same values, whole or in part."""
    with serving() as (broker, client):
        client.put("rows", rows())
        everything = address(broker.read("rows", ReadRequest()))
        part = broker.read("rows", ReadRequest(first_row_id=100, last_row_id=163))
        assert address(part) == everything + 100 * ROW_BYTES
        before = pa.total_allocated_bytes()
        taken = client.take("rows", "reader", max_rows=NUM_ROWS)
        assert pa.total_allocated_bytes() - before < taken.table.nbytes / 8
        assert taken.table["x"].combine_chunks() == rows()["x"].combine_chunks()
