"""The values of a storage server."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from flight.data.spill import SpillDirectory
from flight.errors import OverloadedError, UnavailableError
from flight.storage.values import ValueStore

SCHEMA = pa.schema([pa.field("x", pa.string()), pa.field("y", pa.int32())])


def batch(*texts: str) -> pa.RecordBatch:
    """Return rows with a column x."""
    return pa.record_batch({"uid": [f"u{text}" for text in texts], "x": list(texts)})


def find(store: ValueStore, *numbers: int) -> list[tuple]:
    """Return (row_id, x, y) of rows whose row_ids are 100 more than their numbers."""
    wanted = np.array(numbers, np.int64)
    return [tuple(row.values()) for row in store.find(SCHEMA, wanted, wanted + 100).to_pylist()]


def test_values_are_found_by_number_in_any_order_until_they_are_freed():
    """Numbers go on, what is gone is left out, columns that a batch has not are null."""
    store = ValueStore()
    assert (store.add(batch("a", "b")), store.add(batch()), store.add(batch("c"))) == (0, 2, 2)
    assert find(store, 2, 0, 0, 7) == [(102, "c", None), (100, "a", None), (100, "a", None)]
    store.free([(0, 1), (5, 3)])
    assert find(store, 0, 1, 2) == [(101, "b", None), (102, "c", None)]
    store.free([(0, 3)])
    assert (len(store), store.used_bytes, find(store, 0, 1, 2)) == (0, 0, [])
    assert store.add(batch("d")) == 3


def test_values_are_those_of_the_table_that_is_named():
    """Whoever may read one table finds nothing of another by its numbers."""
    store = ValueStore()
    store.add(batch("a"), "mine")
    store.add(batch("b"), "yours")
    wanted = np.arange(2)
    found = {
        name: store.find(SCHEMA, wanted, wanted, table=name).column("x").to_pylist()
        for name in ("mine", "yours", "absent", "")
    }
    assert found == {"mine": ["a"], "yours": ["b"], "absent": [], "": ["a", "b"]}


def test_values_beyond_the_capacity_are_refused_at_once():
    """Somebody else may have room; what was freed can be used again."""
    store = ValueStore(capacity_bytes=batch("a", "b").nbytes)
    store.add(batch("a", "b"))
    for refused in (store.check_open, lambda: store.add(batch("c"))):
        with pytest.raises(OverloadedError, match="values must be at most capacity_bytes"):
            refused()
    store.clear()
    assert store.add(batch("c")) == 2


def test_values_of_a_closed_store_stay_readable():
    """It takes no more."""
    store = ValueStore()
    store.add(batch("a"))
    store.close()
    with pytest.raises(UnavailableError, match="got a put while it leaves"):
        store.add(batch("b"))
    assert find(store, 0) == [(100, "a", None)]


def test_values_go_to_disk_oldest_first(tmp_path):
    """And come back the same."""
    spill = SpillDirectory(tmp_path)
    store = ValueStore(spill=spill, memory_bytes=1)
    for text in "abc":
        store.add(batch(text))
    assert find(store, 0, 1, 2) == [(100, "a", None), (101, "b", None), (102, "c", None)]
    assert store.disk_bytes > 0
    spill.close()
