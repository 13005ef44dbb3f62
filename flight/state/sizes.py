"""How large values are, without touching them: lengths of lists, strings and binaries, or integers as they are.

One Arrow call a retained batch, whatever the number of tokens; only sizes of rows asked for become Python numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from flight.data.store import Place


def can_be_sized(arrow_type: pa.DataType) -> bool:
    """Return whether values of this type have a size: integers, lists, strings and binaries."""
    return pa.types.is_integer(arrow_type) or _is_list(arrow_type) or _is_binary(arrow_type)


def sizes_of(places: Sequence[Place | None], column: str) -> list[int]:
    """Return the size of each row's value in a column of such a type; 0 for what is null or has not come."""
    sizes = [0] * len(places)
    by_batch: dict[int, list[int]] = {}
    for position, place in enumerate(places):
        if place is not None:
            by_batch.setdefault(id(place[0]), []).append(position)
    for positions in by_batch.values():
        found = [place for position in positions if (place := places[position]) is not None]
        batch = found[0][0]
        index = batch.schema.get_field_index(column)
        if index < 0:
            continue
        chosen = pa.array([place[1] for place in found], pa.int64())
        for position, size in zip(
            positions, _sizes(batch.column(index)).take(chosen).to_pylist(), strict=True
        ):
            sizes[position] = size or 0
    return sizes


def _sizes(values: pa.Array) -> pa.Array:
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
