"""Where values lie: copying in, gathering out, freeing."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from flight.data.store import ColumnStore, cut, gather, retain

INT = pa.int64()


def batch(*values: int, name: str = "x") -> pa.RecordBatch:
    """Return one column of numbers."""
    return pa.record_batch({name: pa.array(values, INT)})


def test_retain_copies_only_what_the_batch_shows():
    """A slice of a large batch keeps its own bytes and no more."""
    large = pa.record_batch({"x": np.zeros(1_000_000), "s": ["text"] * 1_000_000})
    kept = retain(large.slice(10, 4))
    assert kept.equals(large.slice(10, 4))
    assert kept.get_total_buffer_size() < 1000


def test_gather_returns_rows_in_the_order_asked_for():
    """Rows of several batches, permuted, with one whose part has not come."""
    store = ColumnStore(1)
    store.add(0, batch(10, 11, 12), [0, 1, 2])
    store.add(0, batch(20, 21), [3, -1])
    places = store.locate(0, [3, 2, 0, 99, 1])
    assert gather(places, "x", INT).to_pylist() == [20, 12, 10, None, 11]
    assert gather(places, "absent", pa.string()).to_pylist() == [None] * 5


def test_gather_of_neighbours_copies_nothing():
    """Rows that lie side by side are a slice of the retained batch."""
    store = ColumnStore(1)
    kept = batch(*range(100))
    store.add(0, kept, list(range(100)))
    column = gather(store.locate(0, list(range(20, 60))), "x", INT)
    assert column.num_chunks == 1
    assert column.chunk(0).buffers()[1].address == kept.column(0).buffers()[1].address


@pytest.mark.parametrize("kind", [pa.list_(pa.uint8()), pa.large_list(pa.int32())], ids=str)
def test_gather_copies_long_lists_once(kind):
    """Rows out of order: Arrow allocates their bytes and next to nothing else; nulls and empty lists stay."""
    rows = [[number] * 2000 for number in range(40)] + [None, []]
    kept = pa.record_batch({"x": pa.array(rows, kind)})
    store = ColumnStore(1)
    store.add(0, kept, list(range(42)))
    wanted = [*range(0, 40, 2), 41, 40, 7]
    pool = pa.default_memory_pool()
    before = pool.total_bytes_allocated()
    column = gather(store.locate(0, wanted), "x", kind)
    num_bytes = pool.total_bytes_allocated() - before
    assert column.to_pylist() == [rows[index] for index in wanted]
    assert num_bytes < 1.2 * column.nbytes
    store.free([row_id for row_id in range(42) if row_id not in wanted[-12:]])
    assert gather(store.locate(0, wanted[-12:]), "x", kind).to_pylist() == [
        rows[row_id] for row_id in wanted[-12:]
    ]


def test_store_frees_memory_as_rows_go():
    """Half-empty batches are compacted, empty ones are gone, places given out before stay valid."""
    store = ColumnStore(1)
    values = pa.record_batch({"x": np.arange(32_768)})
    store.add(0, values, list(range(32_768)))
    full = store.nbytes
    places = store.locate(0, [0, 32_767])
    store.free(list(range(30_000)))
    assert store.nbytes < full / 10
    assert gather(places, "x", INT).to_pylist() == [0, 32_767]
    assert gather(store.locate(0, [32_767, 30_000]), "x", INT).to_pylist() == [32_767, 30_000]
    store.free(list(range(30_000, 32_768)))
    assert store.nbytes == 0
    assert store.locate(0, [1]) == [(None, range(1))]


def test_store_keeps_parts_of_a_row_apart():
    """Each part of a row is freed with the row, wherever it lies."""
    store = ColumnStore(2)
    store.add(0, batch(1, 2), [0, 1])
    store.add(1, batch(7, name="y"), [1])
    assert gather(store.locate(1, [0, 1]), "y", INT).to_pylist() == [None, 7]
    store.free([0, 1])
    assert store.nbytes == 0


def test_cut_makes_batches_of_two_megabytes():
    """Large tables are cut by bytes, many small pieces are joined."""
    table = pa.table({"x": np.zeros(2_000_000)})
    sizes = [each.nbytes for each in cut(table).to_batches()]
    assert max(sizes) <= 2 << 20
    assert len(sizes) == 8
    crumbs = pa.Table.from_batches([batch(index) for index in range(500)])
    assert cut(crumbs).column(0).num_chunks == 1
    assert cut(crumbs).equals(crumbs)
