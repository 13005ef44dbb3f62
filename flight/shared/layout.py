"""Tables as places in the arena, and back, without looking at a value. Pure but for the memory that it points at.

A column whose buffers all lie in the arena is described by their offsets; a slice is described as one, so that nothing
moves. Types that are not plain (views, unions, maps, dictionaries, run ends) and structs are not described: the caller
copies these columns.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pyarrow as pa
import pyarrow.types as pt

MAX_COPY_THREADS = 4
"""Threads that copy one large buffer: one alone does not use all of the memory's bandwidth."""


class Piece(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One Arrow array: rows `offset` to `offset + length` of `buffers`, each (place in the arena, bytes) or null.

    `values` is the array of a list's values.
    """

    length: int
    offset: int = 0
    buffers: list[tuple[int, int] | None]
    values: Piece | None = None


class SharedTable(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A table that lies in the arena in part or whole, held by `grant`.

    arrow_schema: all columns, with the metadata of the answer; empty on an open stream, which has a schema.
    columns: pieces by name; other columns are in the stream that came with this or, if `rest` is there, in an Arrow
        IPC stream at `rest`, a place of the arena.
    """

    grant: int
    columns: dict[str, list[Piece]]
    arrow_schema: bytes = b""
    rest: tuple[int, int] | None = None


def describe(column: pa.ChunkedArray, base: int, capacity_bytes: int) -> list[Piece] | None:
    """Return where a column lies in the arena at address `base`; None if a part of it lies elsewhere."""
    pieces = []
    for chunk in column.chunks:
        piece = _piece(chunk, base, capacity_bytes)
        if piece is None:
            return None
        pieces.append(piece)
    return pieces


def offsets_of(pieces: list[Piece]) -> set[int]:
    """Return a byte of each buffer that the pieces point at."""
    found = set()
    for piece in pieces:
        found |= {place[0] for place in piece.buffers if place is not None and place[1]}
        if piece.values is not None:
            found |= offsets_of([piece.values])
    return found


def rebuild(
    pieces: list[Piece], arrow_type: pa.DataType, buffer_at: Callable[[int, int], pa.Buffer]
) -> pa.ChunkedArray:
    """Return the column that `describe` saw; `buffer_at` maps a place to memory."""
    return pa.chunked_array([_array(piece, arrow_type, buffer_at) for piece in pieces], arrow_type)


def write_stream(table: pa.Table | pa.RecordBatch, sink: pa.NativeFile) -> None:
    """Write an Arrow IPC stream."""
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)


def copy_stream(table: pa.Table | pa.RecordBatch, place: pa.Buffer) -> None:
    """Write an Arrow IPC stream into memory; large buffers are copied by several threads."""
    sink = pa.FixedSizeBufferWriter(place)
    sink.set_memcopy_threads(min(MAX_COPY_THREADS, pa.cpu_count()))
    write_stream(table, sink)


def stream_bytes(table: pa.Table | pa.RecordBatch) -> int:
    """Return how long `write_stream` will be, without copying a value."""
    sink = pa.MockOutputStream()
    write_stream(table, sink)
    return sink.size()


def _piece(array: pa.Array, base: int, capacity_bytes: int) -> Piece | None:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    num_buffers = _num_buffers(array.type)
    if not num_buffers:
        return None
    places: list[tuple[int, int] | None] = []
    for buffer in array.buffers()[:num_buffers]:
        if buffer is None or not buffer.size:
            places.append(None if buffer is None else (0, 0))
            continue
        offset = buffer.address - base
        if not 0 <= offset <= capacity_bytes - buffer.size:
            return None
        places.append((offset, buffer.size))
    values = None
    if _is_nested(array.type):
        values = _piece(array.values, base, capacity_bytes)
        if values is None:
            return None
    return Piece(length=len(array), offset=array.offset, buffers=places, values=values)


def _array(piece: Piece, arrow_type: pa.DataType, buffer_at: Callable[[int, int], pa.Buffer]) -> pa.Array:
    if isinstance(arrow_type, pa.BaseExtensionType):
        storage = _array(piece, arrow_type.storage_type, buffer_at)
        return pa.ExtensionArray.from_storage(arrow_type, storage)
    children = None
    if piece.values is not None:
        children = [_array(piece.values, arrow_type.value_type, buffer_at)]
    return pa.Array.from_buffers(
        arrow_type,
        piece.length,
        [None if place is None else buffer_at(*place) for place in piece.buffers],
        null_count=0 if piece.buffers[0] is None else -1,
        offset=piece.offset,
        children=children,
    )


def _is_nested(arrow_type: pa.DataType) -> bool:
    return pt.is_list(arrow_type) or pt.is_large_list(arrow_type) or pt.is_fixed_size_list(arrow_type)


def _num_buffers(arrow_type: pa.DataType) -> int:
    """Return how many buffers an array has of its own; 0 for a type that is not described."""
    if pt.is_fixed_size_list(arrow_type):
        return 1
    if pt.is_list(arrow_type) or pt.is_large_list(arrow_type):
        return 2
    if pt.is_string(arrow_type) or pt.is_binary(arrow_type):
        return 3
    if pt.is_large_string(arrow_type) or pt.is_large_binary(arrow_type):
        return 3
    is_plain = pt.is_primitive(arrow_type) or pt.is_fixed_size_binary(arrow_type) or pt.is_decimal(arrow_type)
    return 2 if is_plain else 0
