"""Which received batches can be kept as they came."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from flight import messages as m
from flight.server.putting import MIN_KEPT_BYTES, fills_its_message, sum_up


def received(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch as it comes from a stream: slices of one message."""
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema)


def rows(num_rows: int, row_bytes: int, uid_bytes: int = 8) -> pa.RecordBatch:
    """Return rows with a uid and a tensor."""
    values = pa.array(np.zeros(num_rows * row_bytes, np.uint8))
    return pa.record_batch(
        {
            "uid": [f"{row:0{uid_bytes}d}" for row in range(num_rows)],
            "x": pa.FixedSizeListArray.from_arrays(values, row_bytes),
        }
    )


@pytest.mark.parametrize(
    ("batch", "can_stay"),
    [
        (received(rows(2, MIN_KEPT_BYTES)), True),
        (received(rows(1000, 2000)), True),
        (received(rows(2, 1000)), False),
        (received(rows(1000, 2000, uid_bytes=500)), False),
        (received(rows(4, MIN_KEPT_BYTES)).select(["uid"]), False),
        (rows(2, MIN_KEPT_BYTES), False),
        (pa.record_batch({"uid": pa.array([], pa.string())}), False),
    ],
    ids=[
        "large rows",
        "many rows",
        "small",
        "mostly keys",
        "no values",
        "not received",
        "nothing",
    ],
)
def test_batch_stays_where_it_came_only_if_it_fills_its_message(batch, can_stay):
    """What is kept for nothing is a sixteenth of a message at most; small messages may be parts of larger memory."""
    assert fills_its_message(batch) is can_stay


def test_acknowledgements_add_up():
    """One for a whole put has the rows of all batches, in order."""
    acks = [
        m.PutAck(num_rows=2, num_duplicates=1, row_ids=[4, 0]),
        m.PutAck(num_rows=1, num_duplicates=0, row_ids=[5]),
    ]
    assert sum_up(acks) == m.PutAck(num_rows=3, num_duplicates=1, row_ids=[4, 0, 5])
    assert sum_up([]) == m.PutAck(num_rows=0, num_duplicates=0, row_ids=[])
