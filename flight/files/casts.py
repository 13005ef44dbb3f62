"""One Arrow array as another type, only if nothing is lost. No state.

Widths may change where every value survives (int64 to int32, string to large_string, float to double), kinds may not: a
number does not become text, an integer does not become a time. Lists, structs and tensors are compared part by part.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


class LossError(Exception):
    """An array cannot become a type. `row` is the first row in the way, None if it is the type itself."""

    def __init__(self, got: str, row: int | None = None, way_out: str = "") -> None:
        super().__init__(got)
        self.got = got
        self.row = row
        self.way_out = way_out


def fit(array: pa.Array, target: pa.DataType, *, round_floats: bool = False) -> pa.Array:
    """Return an array as `target`; with `round_floats`, wide floats may lose digits.

    Raises:
        LossError: the kinds differ, or a value would change.
    """
    if array.type == target:
        return array
    plain = _plain(array)
    storage = target.storage_type if isinstance(target, pa.BaseExtensionType) else target
    if not _is_same_kind(plain.type, storage):
        raise LossError(str(array.type))
    try:
        done = _checked(plain, storage, round_floats)
    except pa.ArrowException:
        row = _first_loss(plain, storage, round_floats)
        way_out = (
            "" if round_floats or not _has_floats(storage) else "give --round-floats to take the nearest"
        )
        raise LossError(_shown(array[row]), row, way_out) from None
    return pa.ExtensionArray.from_storage(target, done) if storage is not target else done


def _plain(array: pa.Array) -> pa.Array:
    """Return an array without extension type, dictionary or run lengths."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_run_end_encoded(array.type):
        array = pc.run_end_decode(array)
    return array


def _checked(array: pa.Array, target: pa.DataType, round_floats: bool) -> pa.Array:
    """Cast; raise ArrowInvalid if a value does not survive."""
    done = array.cast(target)
    for before, after in zip(_leaves(array), _leaves(done.cast(array.type)), strict=True):
        if not pa.types.is_floating(before.type):
            continue
        if round_floats:
            same = pc.equal(pc.is_inf(before), pc.is_inf(after))
        else:
            # A NaN is unequal to itself and survives as a NaN.
            same = pc.or_(pc.equal(before, after), pc.and_(pc.is_nan(before), pc.is_nan(after)))
        if not pc.all(same, skip_nulls=True, min_count=0).as_py():
            raise pa.ArrowInvalid("a float would change")
    return done


def _first_loss(array: pa.Array, target: pa.DataType, round_floats: bool) -> int:
    for row in range(len(array)):
        try:
            # Not a slice: casting that looks at all values of a list.
            _checked(array.take(pa.array([row])), target, round_floats)
        except pa.ArrowException:
            return row
    return 0


def _leaves(array: pa.Array) -> list[pa.Array]:
    """Return the arrays of plain values inside an array."""
    if pa.types.is_struct(array.type):
        return [leaf for part in array.flatten() for leaf in _leaves(part)]
    if pa.types.is_map(array.type):
        entries = array.cast(pa.list_(pa.struct([array.type.key_field, array.type.item_field])))
        return _leaves(entries)
    if _is_list(array.type):
        return _leaves(array.flatten())
    return [array]


def _is_list(arrow_type: pa.DataType) -> bool:
    is_type = pa.types
    return (
        is_type.is_list(arrow_type)
        or is_type.is_large_list(arrow_type)
        or is_type.is_fixed_size_list(arrow_type)
        or is_type.is_list_view(arrow_type)
        or is_type.is_large_list_view(arrow_type)
    )


def _is_same_kind(source: pa.DataType, target: pa.DataType) -> bool:
    """Return whether one type may become the other at all."""
    if pa.types.is_null(source) or source == target:
        return True
    if _is_list(source) and _is_list(target):
        return _is_same_kind(source.value_type, target.value_type)
    if pa.types.is_struct(source) and pa.types.is_struct(target):
        return source.names == target.names and all(
            _is_same_kind(source.field(index).type, target.field(index).type)
            for index in range(source.num_fields)
        )
    if pa.types.is_map(source) and pa.types.is_map(target):
        return _is_same_kind(source.key_type, target.key_type) and _is_same_kind(
            source.item_type, target.item_type
        )
    return _kind(source) == _kind(target) != "other"


def _kind(arrow_type: pa.DataType) -> str:
    is_type = pa.types
    kinds = {
        "number": is_type.is_integer(arrow_type) or is_type.is_floating(arrow_type),
        "text": is_type.is_string(arrow_type)
        or is_type.is_large_string(arrow_type)
        or is_type.is_string_view(arrow_type),
        "binary": is_type.is_binary(arrow_type)
        or is_type.is_large_binary(arrow_type)
        or is_type.is_binary_view(arrow_type)
        or is_type.is_fixed_size_binary(arrow_type),
        "decimal": is_type.is_decimal(arrow_type),
        "date": is_type.is_date(arrow_type),
        "time": is_type.is_time(arrow_type),
        "duration": is_type.is_duration(arrow_type),
    }
    if is_type.is_timestamp(arrow_type):
        return "instant" if arrow_type.tz else "local time"
    return next((kind for kind, is_it in kinds.items() if is_it), "other")


def _has_floats(arrow_type: pa.DataType) -> bool:
    children = [arrow_type.field(index).type for index in range(arrow_type.num_fields)]
    return pa.types.is_floating(arrow_type) or any(_has_floats(child) for child in children)


def _shown(value: pa.Scalar) -> str:
    text = str(value)
    return f"{text if len(text) <= 60 else text[:60] + '...'} ({value.type})"
