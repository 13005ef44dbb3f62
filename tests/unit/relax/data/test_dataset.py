"""Arrow columns as torch and numpy views, and a DataLoader whose spawned workers share one consumer."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from flight.client import QueueClient
from flight.errors import DeadlineExceededError, InvalidRequestError
from flight.schema import Column, ConsumerSpec, TableSpec
from relax.data.dataset import QueueDataset, to_arrays
from tests.kit.server import queue_server

SPEC = TableSpec(
    name="rows",
    columns=(
        Column(name="tokens", type=pa.list_(pa.int32()), meaning="tokens"),
        Column(name="reward", type=pa.float32(), meaning="reward"),
        Column(name="text", type=pa.string(), meaning="text"),
    ),
    consumers=(ConsumerSpec(name="trainer", columns=("tokens", "reward", "text")),),
)


def rows(num_rows: int) -> pa.Table:
    """Return rows of 0, 1, 2, ... tokens."""
    return pa.table(
        {
            "uid": [str(index) for index in range(num_rows)],
            "tokens": pa.array([list(range(index)) for index in range(num_rows)], pa.list_(pa.int32())),
            "reward": pa.array(range(num_rows), pa.float32()),
            "text": [f"text {index}" for index in range(num_rows)],
        }
    )


@pytest.fixture
def client():
    """A client of a server with one table."""
    with queue_server() as (uri, _), QueueClient(uri, identity="test", deadline_s=20.0) as connected:
        connected.create_table(SPEC)
        yield connected


@pytest.mark.parametrize("values", ["torch", "numpy"])
def test_columns_become_arrays_without_a_copy(values):
    """Numbers, booleans, fixed shapes, ragged lists; text and absent values stay as they are."""
    pixels = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
    table = pa.table(
        {
            "number": pa.array([1.5, 2.5], pa.float32()),
            "flag": [True, False],
            "text": ["a", None],
            "absent": pa.array([1, None], pa.int64()),
            "ragged": pa.array([[1, 2, 3], None], pa.list_(pa.int32())),
            "pair": pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2)),
            "pixels": pixels,
            "nested": pa.array([[[1], [2, 3]], []], pa.list_(pa.list_(pa.int64()))),
        }
    )
    found = to_arrays(table, values)
    kind = torch.Tensor if values == "torch" else np.ndarray
    for name in ("number", "flag", "pair", "pixels"):
        assert isinstance(found[name], kind)
    assert found["number"].tolist() == [1.5, 2.5]
    assert found["flag"].tolist() == [True, False]
    assert (found["text"], found["absent"]) == (["a", None], [1, None])
    assert (found["ragged"][0].tolist(), found["ragged"][1]) == ([1, 2, 3], None)
    assert found["pair"].tolist() == [[1, 2], [3, 4]]
    assert tuple(found["pixels"].shape) == (2, 3, 4)
    assert [[each.tolist() for each in row] for row in found["nested"]] == [[[1], [2, 3]], []]
    assert to_arrays(table.slice(1), values)["pair"].tolist() == [[3, 4]]
    address = table["number"].chunk(0).buffers()[1].address
    assert (found["number"].data_ptr() if values == "torch" else found["number"].ctypes.data) == address


def test_rows_are_acked_when_the_next_are_asked_for(client):
    """And those of the item at which the loop was left are delivered again."""
    client.put("rows", rows(6))
    items = iter(QueueDataset(client.uri, "rows", "trainer", max_rows=2, columns=["reward"]))
    assert next(items)["reward"].tolist() == [0.0, 1.0]
    assert client.stats("rows")["consumers"]["trainer"]["acked"] == 0
    assert next(items)["reward"].tolist() == [2.0, 3.0]
    assert client.stats("rows")["consumers"]["trainer"]["acked"] == 2
    items.close()
    stats = client.stats("rows")["consumers"]["trainer"]
    assert (stats["acked"], stats["ready"], stats["leased"]) == (2, 4, 0)


@pytest.mark.slow
def test_spawned_workers_share_the_rows_and_the_caller_acks(client):
    """Two workers, each row once; nothing is acked before the training loop says so."""
    client.put("rows", rows(20))
    dataset = QueueDataset(client.uri, "rows", "trainer", max_rows=4, ack="caller", idle_deadline_s=30.0)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    seen: list[int] = []
    for step, batch in enumerate(loader):
        assert all(len(tokens) == int(uid) for tokens, uid in zip(batch["tokens"], batch["uid"], strict=True))
        assert batch["reward"].dtype == torch.float32
        seen += batch["row_id"].tolist()
        assert dataset.ack(batch, step=step) == len(batch["uid"])
        if len(seen) == 20:
            client.seal("rows")
    assert sorted(seen) == list(range(20))
    assert client.stats("rows")["rows"] == 0


def test_dataset_waits_no_longer_than_it_was_told(client):
    """An empty table that nobody seals; and choices that are none."""
    with pytest.raises(DeadlineExceededError) as caught:
        next(iter(QueueDataset(client.uri, "rows", "trainer", max_rows=1, idle_deadline_s=0.2)))
    assert str(caught.value) == "QueueDataset of rows: rows must come within 0.2 s, got none"
    with pytest.raises(InvalidRequestError, match="ack must be one of"):
        QueueDataset("grpc://127.0.0.1:1", "rows", "trainer", max_rows=1, ack="never")
