"""How large values are, without touching them: lengths of lists, strings and binaries, or integers as they are.

One Arrow call a retained batch, whatever the number of tokens; only sizes of rows asked for become Python numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from flight.data.store import Run


def can_be_sized(arrow_type: pa.DataType) -> bool:
    """Return whether values of this type have a size: integers, lists, strings and binaries."""
    return pa.types.is_integer(arrow_type) or _is_list(arrow_type) or _is_binary(arrow_type)


def sizes_of(runs: Sequence[Run], column: str) -> list[int]:
    """Return the size of each row's value in a column of such a type; 0 for what is null or has not come."""
    sizes: list[int] = []
    by_batch: dict[int, pa.Array] = {}
    for run in runs:
        position = -1 if run.batch is None else run.batch.schema.get_field_index(column)
        if run.batch is None or position < 0:
            sizes += [0] * len(run.indices)
            continue
        if id(run.batch) not in by_batch:
            by_batch[id(run.batch)] = sizes_of_values(run.batch.column(position))
        found = by_batch[id(run.batch)].take(pa.array(run.indices, pa.int64()))
        sizes += [size or 0 for size in found.to_pylist()]
    return sizes


def sizes_of_values(values: pa.Array) -> pa.Array:
    """Return the size of each value of such a type, null where the value is."""
    if _is_list(values.type):
        return pc.list_value_length(values)
    return pc.binary_length(values) if _is_binary(values.type) else values


def _is_list(arrow_type: pa.DataType) -> bool:
    return (
        pa.types.is_list(arrow_type)
        or pa.types.is_large_list(arrow_type)
        or pa.types.is_fixed_size_list(arrow_type)
    )


def _is_binary(arrow_type: pa.DataType) -> bool:
    return (
        pa.types.is_string(arrow_type)
        or pa.types.is_large_string(arrow_type)
        or pa.types.is_binary(arrow_type)
        or pa.types.is_large_binary(arrow_type)
    )
