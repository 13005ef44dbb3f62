"""Ragged numpy arrays as Arrow list columns over one flat buffer, and views back. No Python object per element.

It knows nothing of media: a row is None (null) or a flat array.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from modalities.errors import MediaLimitError, ModalityError

MAX_ELEMENTS = 2**31 - 1
"""An Arrow list counts its elements in 32 bits."""


def pack_list(rows: Sequence[Sequence[np.ndarray]], value_type: pa.DataType) -> pa.ListArray:
    """Return a `list<value_type>` array: each row is its arrays flattened one after another, no arrays give null.

    Copies each array once, one that is not contiguous too.

    Raises:
        MediaLimitError: the rows hold more elements than an Arrow list can count.
    """
    dtype = value_type.to_pandas_dtype()
    sizes = [sum(array.size for array in row) for row in rows]
    if sum(sizes) > MAX_ELEMENTS:
        raise MediaLimitError(
            f"rows must hold at most {MAX_ELEMENTS} values together, got {sum(sizes)}; put fewer rows"
        )
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    values = np.empty(offsets[-1], dtype)
    start = 0
    for array in (array for row in rows for array in row):
        values[start : start + array.size].reshape(array.shape)[...] = array
        start += array.size
    absent = np.fromiter((not row for row in rows), bool, len(rows))
    mask = pa.array(absent) if absent.any() else None
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, value_type), mask=mask)


def pack_triples(rows: Sequence[Sequence[np.ndarray]]) -> pa.ListArray:
    """Return a `list<fixed_size_list<int32, 3>>` array, one triple for each array of a row; no arrays give null."""
    triples = [np.asarray(array, np.int32).reshape(3) for row in rows for array in row]
    values = pa.FixedSizeListArray.from_arrays(
        pa.array(np.concatenate(triples or [np.empty(0, np.int32)])), 3
    )
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    absent = np.fromiter((not row for row in rows), bool, len(rows))
    mask = pa.array(absent) if absent.any() else None
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=mask)


def unpack_list(column: pa.Array | pa.ChunkedArray) -> list[np.ndarray | None]:
    """Return each row of a list column as a flat read-only view, null as None; triples are flattened to [3 * n].

    Sliced and chunked columns are fine; nothing is copied.
    """
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    rows: list[np.ndarray | None] = []
    for chunk in chunks:
        if not len(chunk):
            continue
        values, width = chunk.values, 1
        if pa.types.is_fixed_size_list(values.type):
            width = values.type.list_size
            start = values.offset * width
            values = values.values[start : start + len(values) * width]
        flat = values.to_numpy(zero_copy_only=True)
        offsets = chunk.offsets.to_numpy(zero_copy_only=True) * width
        present = chunk.is_valid().to_numpy(zero_copy_only=False)
        rows += [
            flat[start:end] if valid else None
            for start, end, valid in zip(
                offsets[:-1].tolist(), offsets[1:].tolist(), present.tolist(), strict=True
            )
        ]
    return rows


def unpack_present(column: pa.Array | pa.ChunkedArray) -> list[np.ndarray]:
    """Return each row as `unpack_list` does, for a column that must not be null.

    Raises:
        ModalityError: a row is null.
    """
    rows = unpack_list(column)
    present = [row for row in rows if row is not None]
    if len(present) != len(rows):
        raise ModalityError(f"list column: every row must be there, got {len(rows) - len(present)} null rows")
    return present
