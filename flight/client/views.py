"""Columns of a taken table as numpy arrays that share its memory, for numpy and torch. Nothing here copies a value.

**Lifetime.** An array keeps the Arrow buffers that it looks into alive, and over shared memory the slots of the arena
with them: they go back to the server when the last array, tensor or table of a take is gone. So drop views that are not
needed, and copy the few rows that outlive their batch. Neither the ack nor the end of a lease or client touches them.

**Read only.** The memory belongs to others; over shared memory a write ends the process (SIGSEGV). numpy refuses to
write; torch does not know of memory that is read-only and warns in `torch.from_numpy(view)`: copy (`.clone()`, `.to()`
another device or type) before changing anything in place. `torch.from_dlpack(array)` of the Arrow array itself shares
the memory too, and does not even warn.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from flight.errors import InvalidRequestError


def numpy_views(column: pa.Array | pa.ChunkedArray, shape: Sequence[int] | None = None) -> list[Any]:
    """Return rows of one fixed shape as numpy arrays, one a chunk: batches that were put apart lie apart.

    **Shapes**: `[num_rows, *shape]` each. By default `shape` is that of the column's type: `()` for numbers, that of
    a fixed-shape tensor, the sizes of (nested) fixed-size lists. Lists of any length need a `shape`, and each row must
    have as many values.

    Raises:
        InvalidRequestError: there are nulls, the type has no numpy view (bools, texts, structs), or rows do not fit.
    """
    return [_view(chunk, shape) for chunk in _chunks(column)]


def list_views(column: pa.Array | pa.ChunkedArray) -> list[tuple[Any, Any]]:
    """Return rows of different lengths as (values, offsets), one pair a chunk.

    **Shapes**: values `[num_values]`, offsets `[num_rows + 1]`: row i is `values[offsets[i] : offsets[i + 1]]`.

    Raises:
        InvalidRequestError: the column is no list, or there are nulls, among rows or values.
    """
    views = []
    for chunk in _chunks(column):
        if not (pt.is_list(chunk.type) or pt.is_large_list(chunk.type)):
            raise _unfit("column", "a list", chunk.type)
        views.append((_numbers(chunk.values), chunk.offsets.to_numpy(zero_copy_only=True)))
    return views


def _view(array: pa.Array, shape: Sequence[int] | None) -> Any:
    if isinstance(array, pa.FixedShapeTensorArray):
        return _shaped(array.storage.flatten(), len(array), array.type.shape if shape is None else shape)
    if isinstance(array, pa.ExtensionArray):
        return _view(array.storage, shape)
    if pt.is_list(array.type) or pt.is_large_list(array.type):
        if shape is None:
            raise _unfit("shape", "given for lists of any length", None)
        lengths = set(array.value_lengths().unique().to_pylist())
        if lengths - {prod(shape)}:
            raise _unfit(
                "rows", f"of {prod(shape)} values, for the shape {tuple(shape)}", sorted(lengths)[:5]
            )
        return _shaped(array.flatten(), len(array), shape)
    values, sizes = array, []
    while pt.is_fixed_size_list(values.type):
        sizes.append(values.type.list_size)
        _check_nulls(values)
        values = values.flatten()
    return _shaped(values, len(array), sizes if shape is None else shape)


def _shaped(values: pa.Array, num_rows: int, shape: Sequence[int]) -> Any:
    if len(values) != num_rows * prod(shape):
        raise _unfit("shape", f"of {len(values)} values in {num_rows} rows", tuple(shape))
    return _numbers(values).reshape(num_rows, *shape)


def _numbers(values: pa.Array) -> Any:
    _check_nulls(values)
    if not (pt.is_integer(values.type) or pt.is_floating(values.type)):
        raise _unfit("values", "numbers", values.type)
    return values.to_numpy(zero_copy_only=True)


def _chunks(column: pa.Array | pa.ChunkedArray) -> list[pa.Array]:
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    for chunk in chunks:
        _check_nulls(chunk)
    return list(chunks)


def _check_nulls(array: pa.Array) -> None:
    if array.null_count:
        raise _unfit(
            "column", "without nulls", f"{array.null_count} of {len(array)}; fill or drop them first"
        )


def _unfit(what: str, rule: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"numpy view: {what} must be {rule}, got {value}")
