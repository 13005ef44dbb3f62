"""What a consumer does not ask for does not move: bytes counted on the wire, pages counted in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from flight.client import QueueClient
from flight.data.spill import SpillDirectory
from flight.data.store import Run, gather
from flight.schema import Column, ConsumerSpec, TableSpec
from modalities.routing import (
    layer_groups,
    routing_columns,
    routing_from_arrow,
    routing_names,
    routing_to_arrow,
)
from tests.kit.server import queue_server
from tests.kit.wire import Traffic, counted_wire

NUM_ROWS = 6
PIXEL_BYTES = 4 << 20
FEW_BYTES = 64 << 10
"""What tokens of a few rows, with all frames of the calls around them, stay below."""


def pixel_table(**changes) -> TableSpec:
    """Tokens and pixels by one writer, masks by another."""
    columns = (
        Column(name="tokens", type=pa.list_(pa.int32()), meaning="tokens", writer="rollout"),
        Column(name="pixels", type=pa.list_(pa.uint8()), meaning="pixels", writer="rollout"),
        Column(name="masks", type=pa.list_(pa.uint8()), meaning="masks", writer="judge", nullable=True),
    )
    consumers = (
        ConsumerSpec(name="actor", columns=("tokens",)),
        ConsumerSpec(name="planned", columns=("tokens",)),
    )
    return TableSpec(name="rows", columns=columns, consumers=consumers, **changes)


def rows(name: str = "pixels") -> pa.Table:
    values = pa.array(np.arange(NUM_ROWS * PIXEL_BYTES, dtype=np.uint32).astype(np.uint8))
    offsets = pa.array(np.arange(NUM_ROWS + 1, dtype=np.int32) * PIXEL_BYTES)
    uids = [f"r{row}" for row in range(NUM_ROWS)]
    tokens = {"tokens": pa.array([[row] * 100 for row in range(NUM_ROWS)], pa.list_(pa.int32()))}
    return pa.table(
        {"uid": uids}
        | (tokens if name == "pixels" else {})
        | {name: pa.ListArray.from_arrays(offsets, values)}
    )


@pytest.fixture(scope="module", params=["memory", "disk"])
def wired(request, tmp_path_factory) -> Iterator[tuple[QueueClient, Traffic]]:
    """Rows of 4 MiB pixels, half of them with masks, in memory or spilled; a client whose wire is counted."""
    directory = tmp_path_factory.mktemp("spill")
    is_spilled = request.param == "disk"
    with (
        queue_server("--spill-dir", str(directory)) as (uri, _),
        counted_wire(uri) as traffic,
        QueueClient(traffic.uri, identity="test", shared_memory=False) as client,
    ):
        client.create_table(pixel_table(spill=is_spilled, memory_bytes=1 << 20))
        client.put("rows", rows(), writer="rollout")
        client.put("rows", rows("masks").slice(0, NUM_ROWS // 2), writer="judge")
        stats = client.stats("rows")
        assert stats["bytes"] > 1.4 * NUM_ROWS * PIXEL_BYTES
        assert stats["disk_bytes"] > (0.9 * stats["bytes"] if is_spilled else -1)
        yield client, traffic


def test_tokens_alone_cross_the_wire(wired):
    """take, read, fetch: whichever verb asks for tokens of rows with pixels, whole or with one part missing."""
    client, traffic = wired
    before = traffic.received
    read = client.read("rows", columns=["tokens"])
    lease = client.take("rows", "actor", max_rows=NUM_ROWS, deadline_s=5.0)
    plan = client.plan("rows", "planned", step=1, num_ranks=1, max_rows=NUM_ROWS, deadline_s=5.0)
    fetched = client.fetch("rows", plan.plan_id, 0, columns=["tokens"])
    found = client.read("rows", columns=["tokens"], filter={"column": "uid", "op": "!=", "value": "r0"})
    assert traffic.received - before < FEW_BYTES
    for table in (read, lease.table, fetched):
        assert table["tokens"].to_pylist() == [[row] * 100 for row in range(NUM_ROWS)]
    assert found.num_rows == NUM_ROWS - 1
    client.nack("rows", "actor", lease_id=lease.lease_id, reason="again")
    client.nack("rows", "planned", lease_id=plan.plan_id, reason="again")


def test_pixels_cross_when_they_are_asked_for(wired):
    """The counter counts: the same verbs with pixels move them, and only those."""
    client, traffic = wired
    before = traffic.received
    taken = client.take("rows", "actor", max_rows=1, columns=["pixels"], deadline_s=5.0)
    assert PIXEL_BYTES < traffic.received - before < PIXEL_BYTES + FEW_BYTES
    assert taken.table["pixels"].chunk(0).values.slice(0, 9).to_pylist() == list(range(9))
    client.nack("rows", "actor", lease_id=taken.lease_id, reason="again")
    before = traffic.received
    partial = client.read("rows", columns=["tokens", "masks"])
    half = NUM_ROWS // 2 * PIXEL_BYTES
    assert half < traffic.received - before < half + 2 * FEW_BYTES
    assert partial["masks"].null_count == NUM_ROWS - NUM_ROWS // 2


def mapped_bytes(path: Path) -> int:
    """Return how much of the maps of files under a directory this process has touched."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            is_ours = str(path) in line
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def test_tokens_of_spilled_rows_are_read_without_their_pixels(tmp_path):
    """The file is mapped: gathering tokens touches the pages of tokens, so nothing else is read from the disk."""
    directory = SpillDirectory(tmp_path / "spill")
    batches = rows().combine_chunks().to_batches(max_chunksize=2)
    mapped = directory.write(batches)
    places = [Run(batch, range(batch.num_rows)) for batch in mapped]
    before = mapped_bytes(tmp_path)
    tokens = gather(places, "tokens", pa.list_(pa.int32()))
    assert tokens.to_pylist() == [[row] * 100 for row in range(NUM_ROWS)]
    assert mapped_bytes(tmp_path) - before < 2 << 20
    pixels = gather(places, "pixels", pa.list_(pa.uint8()))
    total = sum(int(chunk.flatten().to_numpy().sum()) for chunk in pixels.chunks)
    assert total > 0
    assert mapped_bytes(tmp_path) - before > 0.9 * NUM_ROWS * PIXEL_BYTES
    directory.close()


@pytest.mark.parametrize(("num_experts", "dtype"), [(128, np.uint8), (512, np.uint16)])
def test_routes_of_a_stage_alone_cross_the_wire(client, num_experts, dtype):
    """Twelve of forty-eight layers are a quarter of the bytes, and the same as slicing gives the reader of all."""
    rng = np.random.default_rng(0)
    tables = [rng.integers(0, num_experts, (256, 48, 8)).astype(dtype) for _ in range(8)]
    groups = layer_groups(48, 12)
    spec = TableSpec(
        name="routes",
        columns=routing_columns(num_experts, groups),
        consumers=(ConsumerSpec(name="actor", columns=("routed_experts_shape",)),),
    )
    client.create_table(spec)
    columns = {"uid": pa.array([f"r{row}" for row in range(8)])} | routing_to_arrow(
        tables, num_experts, groups
    )
    client.put("routes", pa.table(columns), writer="rollout")
    with (
        counted_wire(client.uri) as traffic,
        QueueClient(traffic.uri, identity="stage", shared_memory=False) as stage,
    ):
        names = routing_names(spec.columns_by_name, (12, 24))
        lease = stage.take("routes", "actor", max_rows=8, columns=names, deadline_s=5.0)
        size = 8 * 256 * 12 * 8 * np.dtype(dtype).itemsize
        assert size < traffic.received < size + FEW_BYTES
    got = routing_from_arrow(lease.table, (12, 24))
    assert [each.dtype for each in got] == [np.dtype(dtype)] * 8
    assert [hashlib.sha256(np.ascontiguousarray(each)).hexdigest() for each in got] == [
        hashlib.sha256(np.ascontiguousarray(each[:, 12:24])).hexdigest() for each in tables
    ]
