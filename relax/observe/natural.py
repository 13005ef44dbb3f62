"""Columns as pandas, polars and DuckDB like them, and Parquet files that appear whole or not at all.

It is not a recorder: which rows go into which file is decided elsewhere.

Natural types: strings, numbers, timestamps, lists and structs. View types, dictionaries and extension types are
turned into these. Tables of expert numbers (`TENSOR_COLUMNS`) become `binary` beside a column `<name>_shape`,
little-endian, because Parquet has no 8-bit integers and would store each as four bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from relax.errors import WiringError

TENSOR_COLUMNS = ("routed_experts",)
ROW_GROUP_BYTES = 64 << 20


def natural_table(table: pa.Table) -> pa.Table:
    """Return the same rows and columns in natural types; field metadata are kept, no row or column is dropped.

    Raises:
        WiringError: a tensor column holds something else than lists of uint8 or uint16.
    """
    tensors = [
        field.name for field in table.schema if field.name in TENSOR_COLUMNS and _is_nested(field.type)
    ]
    beside = {f"{name}_shape" for name in tensors}
    fields: list[pa.Field] = []
    columns: list[pa.ChunkedArray] = []
    for field, column in zip(table.schema, table.columns, strict=True):
        if field.name in tensors:
            shapes = table.select([name for name in table.column_names if name == f"{field.name}_shape"])
            new_fields, new_columns = _tensor_columns(field, column, shapes)
            fields += new_fields
            columns += new_columns
        elif field.name not in beside:
            new_type = _natural_type(field.type)
            fields.append(field.with_type(new_type).with_nullable(True))
            columns.append(pa.chunked_array([_natural_array(chunk) for chunk in column.chunks], new_type))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=table.schema.metadata))


def _is_nested(given: pa.DataType) -> bool:
    return isinstance(given, pa.BaseExtensionType) or hasattr(given, "value_type")


def _natural_type(given: pa.DataType) -> pa.DataType:
    if isinstance(given, pa.BaseExtensionType):
        return _natural_type(given.storage_type)
    if pa.types.is_dictionary(given):
        return _natural_type(given.value_type)
    if pa.types.is_string_view(given):
        return pa.string()
    if pa.types.is_binary_view(given):
        return pa.binary()
    if pa.types.is_list_view(given) or pa.types.is_list(given):
        return pa.list_(_natural_type(given.value_type))
    if pa.types.is_large_list_view(given) or pa.types.is_large_list(given):
        return pa.large_list(_natural_type(given.value_type))
    if pa.types.is_fixed_size_list(given):
        return pa.list_(_natural_type(given.value_type), given.list_size)
    if pa.types.is_struct(given):
        return pa.struct([field.with_type(_natural_type(field.type)) for field in given])
    return given


def _natural_array(array: pa.Array) -> pa.Array:
    wanted = _natural_type(array.type)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if array.type == wanted:
        return array
    if pa.types.is_struct(wanted):
        children = [_natural_array(array.field(index)) for index in range(array.type.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(wanted), mask=array.is_null())
    if not pa.types.is_list(wanted) and not pa.types.is_large_list(wanted):
        return array.cast(wanted)
    # Not by cast: pyarrow 26 turns a list_view that has nulls into an invalid list.
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = _natural_array(array.flatten())
    if pa.types.is_large_list(wanted):
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values, mask=array.is_null())
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, mask=array.is_null())


def _tensor_columns(
    field: pa.Field, column: pa.ChunkedArray, shapes: pa.Table
) -> tuple[list[pa.Field], list[pa.ChunkedArray]]:
    """Return bytes and shapes; `shapes` has one column, or none when the nesting of `column` tells the shape."""
    dtype = _leaf_dtype(field)
    arrays = [None if value is None else value.astype(dtype, copy=False) for value in _rows(column)]
    blobs = pa.array([None if array is None else array.tobytes() for array in arrays], pa.binary())
    notes = dict(field.metadata or {}) | {b"dtype": dtype.name.encode(), b"byte_order": b"little"}
    if shapes.num_columns:
        found = shapes.column(0).to_pylist()
        shape_notes = shapes.schema.field(0).metadata
    else:
        found = [None if array is None else array.shape for array in arrays]
        shape_notes = {b"meaning": f"sizes of the array whose bytes are in {field.name}".encode()}
    sizes = pa.array(found, pa.list_(pa.int32()))
    fields = [
        pa.field(field.name, pa.binary(), metadata=notes),
        pa.field(f"{field.name}_shape", sizes.type, metadata=shape_notes),
    ]
    return fields, [pa.chunked_array([blobs]), pa.chunked_array([sizes])]


def _leaf_dtype(field: pa.Field) -> np.dtype:
    leaf = field.type
    while _is_nested(leaf):
        leaf = leaf.storage_type if isinstance(leaf, pa.BaseExtensionType) else leaf.value_type
    if leaf not in (pa.uint8(), pa.uint16()):
        raise WiringError(
            f"recorded rows: column {field.name!r} must be lists of uint8 or uint16, got {field.type}; "
            "convert expert numbers before they are put"
        )
    return np.dtype("u1" if leaf == pa.uint8() else "<u2")


def _rows(column: pa.ChunkedArray) -> Iterator[np.ndarray | None]:
    """Yield each row as an array of its own shape; flat lists give one dimension."""
    for chunk in column.chunks:
        if isinstance(chunk, pa.ExtensionArray):
            chunk = chunk.storage
        inner: list[int] = []
        leaf = chunk.type.value_type
        while pa.types.is_fixed_size_list(leaf):
            inner.append(leaf.list_size)
            leaf = leaf.value_type
        for row in range(len(chunk)):
            scalar = chunk[row]
            if not scalar.is_valid:
                yield None
            elif hasattr(leaf, "value_type"):
                yield np.array(scalar.as_py())
            else:
                values = scalar.values
                while hasattr(values.type, "value_type"):
                    values = values.flatten()
                yield (
                    values.to_numpy(zero_copy_only=False).reshape(-1, *inner) if inner else values.to_numpy()
                )


def write_parquet(
    tables: Iterator[pa.Table], schema: pa.Schema, path: Path, *, scratch: Path | None = None
) -> int:
    """Write `tables` to `path`, which appears (or is replaced) only once it is whole and on disk.

    `scratch` is the directory of the unfinished file, on the same file system; absent: beside `path`, hidden.

    Returns:
        Number of rows.
    """
    unfinished = (scratch or path.parent) / f".{path.name}.unfinished"
    num_rows = 0
    with pq.ParquetWriter(
        unfinished, schema, compression="zstd", compression_level=1, **_encodings(schema)
    ) as writer:
        waiting: list[pa.Table] = []
        for table in tables:
            waiting.append(conform(table, schema))
            num_rows += len(table)
            if sum(part.nbytes for part in waiting) >= ROW_GROUP_BYTES:
                writer.write_table(pa.concat_tables(waiting))
                waiting = []
        if waiting:
            writer.write_table(pa.concat_tables(waiting))
    with unfinished.open("rb") as written:
        os.fsync(written.fileno())
    unfinished.replace(path)
    return num_rows


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return `table` in the columns of `schema`; columns that it lacks are null."""
    columns = []
    for field in schema:
        if field.name in table.column_names:
            columns.append(table[field.name].cast(field.type))
        else:
            columns.append(pa.chunked_array([pa.nulls(len(table), field.type)]))
    return pa.Table.from_arrays(columns, schema=schema)


def _encodings(schema: pa.Schema) -> dict[str, list[str]]:
    """Dictionary for text and token ids, byte-stream split for floats (dictionaries make logprobs larger)."""
    dictionary, split = [], []
    for field in schema:
        leaf, path = field.type, field.name
        while pa.types.is_list(leaf) or pa.types.is_large_list(leaf) or pa.types.is_fixed_size_list(leaf):
            leaf, path = leaf.value_type, f"{path}.list.element"
        if pa.types.is_floating(leaf) and not pa.types.is_float16(leaf):
            split.append(path)
        elif pa.types.is_string(leaf) or pa.types.is_integer(leaf):
            dictionary.append(path)
    return {"use_dictionary": dictionary, "use_byte_stream_split": split}
