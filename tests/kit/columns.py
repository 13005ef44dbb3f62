"""A column of every Arrow type that a table of the queue may have, large enough to be worth sharing."""

from __future__ import annotations

import datetime as dt
import decimal
import hashlib

import numpy as np
import pyarrow as pa

NUM_ROWS = 12
NUM_VALUES = 3000


def columns() -> dict[str, pa.Array]:
    """Return columns of `NUM_ROWS` rows by name; every fourth row is null where the type allows it."""
    rng = np.random.default_rng(7)
    wide = [rng.integers(0, 255, NUM_VALUES, dtype=np.uint8).tobytes() for _ in range(NUM_ROWS)]
    found = {
        f"list_{name}": _nulled(_lists(rng, dtype))
        for name, dtype in {
            "uint8": np.uint8, "uint16": np.uint16, "int32": np.int32, "int64": np.int64,
            "float16": np.float16, "float32": np.float32, "float64": np.float64,
        }.items()
    }  # fmt: skip
    texts = [data.hex() * 2 for data in wide]
    tensor = np.ascontiguousarray(rng.random((NUM_ROWS, 20, 50, 3), dtype=np.float32))
    flat = pa.array(rng.random(NUM_ROWS * NUM_VALUES))
    found |= {
        "binary": _nulled(pa.array(wide)),
        "large_binary": _nulled(pa.array([data * 2 for data in wide], pa.large_binary())),
        "string": _nulled(pa.array(texts)),
        "large_string": _nulled(pa.array(texts, pa.large_string())),
        "fixed_binary": pa.array(wide, pa.binary(NUM_VALUES)),
        "list_bool": pa.array([(rng.random(NUM_VALUES * 16) > 0.5).tolist() for _ in wide]),
        "list_string": pa.array([[text[:100]] * 99 for text in texts]),
        "list_list": pa.array(
            [[[1, 2, 3], None, [4]] * NUM_VALUES] * NUM_ROWS, pa.list_(pa.list_(pa.int16()))
        ),
        "list_fixed": pa.array(
            [[[1, 2, 3], [4, 5, 6]] * NUM_VALUES] * NUM_ROWS, pa.list_(pa.list_(pa.int32(), 3))
        ),
        "large_list": _nulled(_lists(rng, np.float64).cast(pa.large_list(pa.float64()))),
        "fixed_list": pa.FixedSizeListArray.from_arrays(flat, NUM_VALUES),
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(tensor),
        "struct": pa.array([{"a": text, "b": [1, 2]} for text in texts]),
        "list_struct": pa.array([[{"a": text, "b": 1.5}] for text in texts]),
        "map": pa.array([[("k", text)] for text in texts], pa.map_(pa.string(), pa.string())),
        "string_view": pa.array(texts, pa.string_view()),
        "list_null": pa.array([[None] * 9] * NUM_ROWS, pa.list_(pa.null())),
        "int": _nulled(pa.array(range(NUM_ROWS), pa.int64())),
        "bool": pa.array([True, None, False] * (NUM_ROWS // 3)),
        "time": pa.array([dt.datetime(2026, 1, 1, tzinfo=dt.UTC)] * NUM_ROWS),
        "decimal": pa.array([decimal.Decimal("1.25")] * NUM_ROWS),
        "null": pa.nulls(NUM_ROWS),
    }
    return found


def digest(column: pa.ChunkedArray | pa.Array) -> str:
    """Return a hash of a column's values, the same wherever and in whatever pieces they lie."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    # concat_arrays does not know views; what is gathered has neither offsets nor slack.
    gathered = pa.table({"x": pa.chunked_array(chunks, column.type)}).take(
        pa.array(range(len(column)), pa.int64())
    )
    sink = pa.BufferOutputStream()
    batch = gathered.combine_chunks()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_table(batch)
    return hashlib.sha256(sink.getvalue()).hexdigest()


def _lists(rng: np.random.Generator, dtype: type) -> pa.Array:
    values = rng.integers(0, 100, NUM_ROWS * NUM_VALUES * 2).astype(dtype)
    lengths = np.r_[0, np.sort(rng.integers(0, len(values), NUM_ROWS - 1)), len(values)].astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(lengths), pa.array(values))


def _nulled(array: pa.Array) -> pa.Array:
    return array.take(pa.array([None if row % 4 == 3 else row for row in range(len(array))], pa.int64()))
