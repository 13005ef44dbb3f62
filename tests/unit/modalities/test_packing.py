"""Ragged arrays to Arrow lists and back."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from modalities.packing import pack_list, pack_triples, unpack_list

ROWS = st.lists(st.lists(st.lists(st.integers(0, 255), max_size=5), max_size=3), max_size=6)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, start=st.integers(0, 6), split=st.integers(0, 6))
def test_packing_gives_back_what_was_packed(rows: list, start: int, split: int) -> None:
    """Whatever the rows, the slice and the chunks."""
    arrays = [[np.array(array, np.uint8) for array in row] for row in rows]
    packed = pack_list(arrays, pa.uint8())
    packed.validate(full=True)
    chunked = pa.chunked_array([packed[:split], packed[split:]], packed.type)[start:]
    expected = [list(itertools.chain(*row)) if row else None for row in rows][start:]
    assert [None if row is None else row.tolist() for row in unpack_list(chunked)] == expected


def test_packing_views_share_the_memory_of_the_column() -> None:
    """Nothing is copied on the way back, and nobody can write into the column."""
    packed = pack_list([[np.arange(5, dtype=np.float32)], []], pa.float32())
    view = unpack_list(packed)[0]
    assert view is not None
    assert np.shares_memory(view, packed.values.to_numpy())
    assert not view.flags.writeable


def test_packing_triples_survive_slices() -> None:
    """Fixed-size lists inside lists keep their places when sliced."""
    packed = pack_triples([[np.array([1, 2, 3])], [], [np.array([4, 5, 6]), np.array([7, 8, 9])]])
    assert packed.type == pa.list_(pa.list_(pa.int32(), 3))
    assert [None if row is None else row.tolist() for row in unpack_list(packed[1:])] == [
        None,
        [4, 5, 6, 7, 8, 9],
    ]


def test_packing_takes_arrays_that_are_not_contiguous() -> None:
    """A range of layers, a transposed picture: the values come in their own order."""
    table = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    packed = pack_list([[table[:, 1:2]], [table.T, table[0, 0, 0]]], pa.uint8())
    assert packed.to_pylist() == [table[:, 1:2].reshape(-1).tolist(), [*table.T.reshape(-1).tolist(), 0]]
