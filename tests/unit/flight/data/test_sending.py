"""What a table becomes on a stream."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flight.data.sending import to_send

SCHEMA = pa.schema([("x", pa.binary())])


@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_one_small_batch_stays_as_it_is(num_rows):
    """Its buffers too; nothing becomes one batch without rows."""
    batch = pa.record_batch({"x": pa.array([b"ab"] * num_rows, pa.binary())}, schema=SCHEMA)
    assert to_send(batch, batch.nbytes)[0] is batch
    [found] = to_send(pa.Table.from_batches([batch] if num_rows else [], SCHEMA), batch.nbytes)
    assert (found.num_rows, found.schema) == (num_rows, SCHEMA)
    if num_rows:
        assert found.column(0).buffers()[2].address == batch.column(0).buffers()[2].address


def test_small_pieces_are_joined_and_large_ones_cut():
    """Always the same rows in the same order."""
    pieces = pa.Table.from_batches([pa.record_batch({"x": [bytes([number])]}, SCHEMA) for number in range(9)])
    [joined] = to_send(pieces, pieces.nbytes)
    assert joined.column("x").to_pylist() == pieces["x"].to_pylist()
    large = pa.table({"x": [bytes(1 << 20)] * 9}, SCHEMA)
    counts = [batch.num_rows for batch in to_send(large, large.nbytes)]
    assert (sum(counts), max(counts) <= 2) == (9, True)
    assert len(to_send(large.to_batches()[0], large.nbytes)) > 3
