"""Columns as numpy arrays: the same memory, the right shape, and a refusal where that cannot be."""

from __future__ import annotations

import gc
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from flight.client.views import list_views, numpy_views
from flight.errors import InvalidRequestError

ROUTING = np.arange(3 * 2 * 4, dtype=np.uint8).reshape(3, 2, 4)


def fixed_lists() -> pa.Array:
    """Return three rows of nested lists of fixed sizes."""
    inner = pa.FixedSizeListArray.from_arrays(pa.array(ROUTING.reshape(-1)), 4)
    return pa.FixedSizeListArray.from_arrays(inner, 2)


def lists() -> pa.Array:
    """Return the same rows as flat lists of any length."""
    return pa.ListArray.from_arrays(pa.array([0, 8, 16, 24], pa.int32()), pa.array(ROUTING.reshape(-1)))


def address(array: np.ndarray) -> int:
    """Return where an array begins."""
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(
    ("column", "shape"),
    [
        (fixed_lists(), None),
        (fixed_lists(), (8,)),
        (lists(), (2, 4)),
        (pa.FixedShapeTensorArray.from_numpy_ndarray(ROUTING), None),
        (pa.array(ROUTING.reshape(-1)), None),
    ],
)
def test_views_share_the_memory_of_the_column(column, shape):
    """Each kind of column gives its values where they lie, for a slice from the slice's first row on."""
    [view] = numpy_views(column, shape)
    buffer = [each for each in column.buffers() if each is not None][-1]
    assert address(view) == buffer.address
    assert view.reshape(-1).tolist() == list(range(24))
    assert not view.flags.writeable
    [part] = numpy_views(pa.chunked_array([column.slice(1)]), shape)
    assert part.tolist() == view[1:].tolist()
    assert address(part) == address(view[1:])


def test_list_views_give_values_and_offsets():
    """Rows of different lengths are found by offsets, in a slice too; chunks stay apart."""
    column = pa.chunked_array([pa.array([[1], [2, 3], []]), pa.array([[4, 5]])]).slice(1)
    rows = [
        values[start:end].tolist()
        for values, offsets in list_views(column)
        for start, end in pairwise(offsets)
    ]
    assert rows == [[2, 3], [], [4, 5]]


def test_view_keeps_the_memory_that_it_looks_into():
    """Values stay as they are when the table is gone."""
    view = numpy_views(pa.array(np.full(100_000, 7)))[0]
    gc.collect()
    assert view.sum() == 700_000


@pytest.mark.parametrize(
    ("column", "shape", "message"),
    [
        (
            pa.array([1, None]),
            None,
            "column must be without nulls, got 1 of 2; fill or drop them first",
        ),
        (pa.array([[1, None]]), (2,), "column must be without nulls, got 1 of 2; fill or drop them first"),
        (pa.array([True]), None, "values must be numbers, got bool"),
        (pa.array(["a"]), None, "values must be numbers, got string"),
        (lists(), None, "shape must be given for lists of any length, got None"),
        (lists(), (3, 3), "rows must be of 9 values, for the shape (3, 3), got [8]"),
        (fixed_lists(), (5,), "shape must be of 24 values in 3 rows, got (5,)"),
    ],
)
def test_views_refuse_what_would_have_to_be_copied(column, shape, message):
    """Nulls, packed bools, texts and rows of another shape."""
    with pytest.raises(InvalidRequestError) as caught:
        numpy_views(column, shape)
    assert str(caught.value) == f"numpy view: {message}"


def test_list_views_refuse_other_columns():
    """Only lists have offsets."""
    with pytest.raises(InvalidRequestError, match="numpy view: column must be a list, got int64"):
        list_views(pa.array([1]))
