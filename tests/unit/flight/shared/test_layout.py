"""Columns as places in memory: the same values come back from the same bytes, or the column is not described."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flight.shared import layout
from tests.kit.columns import columns, digest

COLUMNS = columns()
NOT_DESCRIBED = {"struct", "list_struct", "map", "string_view", "null", "list_null"}


def in_one_buffer(array: pa.Array) -> tuple[pa.Buffer, pa.Array]:
    """Return memory that stands for an arena, and the array as it lies there."""
    sink = pa.BufferOutputStream()
    layout.write_stream(pa.record_batch({"x": array}), sink)
    memory = sink.getvalue()
    return memory, pa.ipc.open_stream(memory).read_next_batch().column(0)


@pytest.mark.parametrize("name", sorted(COLUMNS))
@pytest.mark.parametrize("rows", [(0, 12), (3, 5), (11, 1), (4, 0)], ids=str)
def test_columns_are_rebuilt_from_their_places(name, rows):
    """Whole, in slices, of one row and of none; what is not plain is left to be copied."""
    memory, array = in_one_buffer(COLUMNS[name])
    column = pa.chunked_array([array.slice(*rows)], array.type)
    pieces = layout.describe(column, memory.address, memory.size)
    if name in NOT_DESCRIBED:
        assert pieces is None
        return

    def buffer_at(offset: int, size_bytes: int) -> pa.Buffer:
        return pa.foreign_buffer(memory.address + offset, size_bytes, memory)

    found = layout.rebuild(pieces, array.type, buffer_at)
    found.validate(full=True)
    assert found.type == array.type
    assert digest(found) == digest(column)


def test_columns_elsewhere_are_not_described():
    """A buffer that begins in the arena but ends behind it is elsewhere too."""
    memory, array = in_one_buffer(pa.array(["abc", "def"]))
    column = pa.chunked_array([array, pa.array(["elsewhere"])])
    assert layout.describe(column, memory.address, memory.size) is None
    end = array.buffers()[2].address + 1 - memory.address
    assert layout.describe(pa.chunked_array([array]), memory.address, end) is None


def test_offsets_name_every_buffer():
    """Also those of the values of a list."""
    memory, array = in_one_buffer(pa.array([[1, 2], None], pa.list_(pa.int32())))
    pieces = layout.describe(pa.chunked_array([array]), memory.address, memory.size)
    addresses = {buffer.address for buffer in array.buffers() if buffer is not None}
    assert {memory.address + offset for offset in layout.offsets_of(pieces)} == addresses


@pytest.mark.parametrize("name", sorted(COLUMNS))
def test_stream_bytes_is_what_write_stream_writes(name):
    """A slot is neither too small nor too large."""
    batch = pa.record_batch({"x": COLUMNS[name]})
    sink = pa.BufferOutputStream()
    layout.write_stream(batch, sink)
    assert sink.getvalue().size == layout.stream_bytes(batch)
