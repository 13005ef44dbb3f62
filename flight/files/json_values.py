"""JSON values as values of declared Arrow types, without loss and without guessing. No state.

JSON knows fewer types than Arrow: binary is base64 text, times are ISO 8601 text, decimals and UUIDs are text. A number
of JSON has no width: into a float column the nearest float goes, into an integer column whole numbers only.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import struct
import uuid
from collections.abc import Callable
from typing import Any

import pyarrow as pa

Convert = Callable[[Any], Any]
"""Takes a JSON value that is not null and returns what `pyarrow.array` takes; raises MisfitError."""

_FLOAT_CODES = {16: "<e", 32: "<f", 64: "<d"}
_UNITS_A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


class MisfitError(Exception):
    """A value does not fit. `rule` is what it must be, `value` what came, `path` where inside the column's value."""

    def __init__(self, rule: str, value: Any, path: str = "") -> None:
        super().__init__(rule)
        self.rule = rule
        self.value = value
        self.path = path


def converter(arrow_type: pa.DataType) -> Convert | None:
    """Return what turns JSON values into values of a type; None if JSON cannot hold the type."""
    is_type = pa.types
    if isinstance(arrow_type, pa.FixedShapeTensorType):
        return _tensor(arrow_type)
    if isinstance(arrow_type, pa.JsonType):
        return _text
    if isinstance(arrow_type, pa.UuidType):
        return _uuid
    if isinstance(arrow_type, pa.Bool8Type):
        return lambda value: int(_boolean(value))
    if is_type.is_boolean(arrow_type):
        return _boolean
    if is_type.is_integer(arrow_type):
        return _integer(arrow_type)
    if is_type.is_floating(arrow_type):
        return _floating(arrow_type)
    if (
        is_type.is_string(arrow_type)
        or is_type.is_large_string(arrow_type)
        or is_type.is_string_view(arrow_type)
    ):
        return _text
    if is_type.is_binary(arrow_type) or is_type.is_large_binary(arrow_type):
        return _binary(None)
    if is_type.is_binary_view(arrow_type):
        return _binary(None)
    if is_type.is_fixed_size_binary(arrow_type):
        return _binary(arrow_type.byte_width)
    if is_type.is_decimal(arrow_type):
        return _decimal(arrow_type)
    if is_type.is_temporal(arrow_type):
        return _temporal(arrow_type)
    return _nested(arrow_type)


def to_array(values: list[Any], arrow_type: pa.DataType) -> pa.Array:
    """Return converted values as an Arrow array of a type."""
    if isinstance(arrow_type, pa.ExtensionType | pa.BaseExtensionType):
        storage = arrow_type.storage_type
        return pa.ExtensionArray.from_storage(arrow_type, pa.array(values, storage))
    return pa.array(values, arrow_type)


# ---- scalars --------------------------------------------------------------------------------------------------


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise MisfitError("true or false", value)
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise MisfitError("text", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise MisfitError("text without lone surrogates", value) from None
    return value


def _uuid(value: Any) -> bytes:
    try:
        return uuid.UUID(_text(value)).bytes
    except ValueError:
        raise MisfitError("a UUID as text", value) from None


def _integer(arrow_type: pa.DataType) -> Convert:
    bits = arrow_type.bit_width
    low, high = (
        (-(1 << bits - 1), (1 << bits - 1) - 1)
        if pa.types.is_signed_integer(arrow_type)
        else (0, (1 << bits) - 1)
    )

    def convert(value: Any) -> int:
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise MisfitError(f"an integer from {low} to {high}", value)
        return value

    return convert


def _floating(arrow_type: pa.DataType) -> Convert:
    code = _FLOAT_CODES[arrow_type.bit_width]

    def convert(value: Any) -> float:
        if type(value) not in (int, float):
            raise MisfitError("a number", value)
        try:
            nearest = struct.unpack(code, struct.pack(code, value))[0]
        except (OverflowError, struct.error):
            raise MisfitError(f"a number that {arrow_type} can hold", value) from None
        if type(value) is int and nearest != value:
            raise MisfitError(f"an integer that {arrow_type} holds exactly", value)
        return nearest

    return convert


def _binary(width: int | None) -> Convert:
    def convert(value: Any) -> bytes:
        try:
            data = base64.b64decode(_text(value), validate=True)
        except ValueError:
            raise MisfitError("base64 text", value) from None
        if width is not None and len(data) != width:
            raise MisfitError(f"base64 text of {width} bytes", value)
        return data

    return convert


def _decimal(arrow_type: pa.DataType) -> Convert:
    step = decimal.Decimal(1).scaleb(-arrow_type.scale)
    context = decimal.Context(prec=arrow_type.precision)

    def convert(value: Any) -> decimal.Decimal:
        if type(value) not in (int, str):
            raise MisfitError("a decimal number as text", value)
        try:
            number = decimal.Decimal(value)
            rounded = number.quantize(step, context=context)
        except decimal.InvalidOperation:
            raise MisfitError(f"text of a number within {arrow_type}", value) from None
        if not number.is_finite() or rounded != number:
            raise MisfitError(f"text of a number within {arrow_type}", value)
        return rounded

    return convert


def _temporal(arrow_type: pa.DataType) -> Convert | None:
    if pa.types.is_date(arrow_type):
        return lambda value: _parsed(value, dt.date.fromisoformat, "a date such as 2026-01-31")
    if pa.types.is_time(arrow_type):
        unit = arrow_type.unit
        return lambda value: _whole(
            _parsed(value, dt.time.fromisoformat, "a time such as 13:45:10"), unit, value
        )
    if not pa.types.is_timestamp(arrow_type):
        return None
    has_zone = arrow_type.tz is not None
    rule = "a time such as 2026-01-31T13:45:10" + ("Z, with its zone" if has_zone else ", without a zone")

    def convert(value: Any) -> dt.datetime:
        moment = _parsed(value, dt.datetime.fromisoformat, rule)
        if (moment.tzinfo is not None) != has_zone:
            raise MisfitError(rule, value)
        return _whole(moment, arrow_type.unit, value)

    return convert


def _parsed(value: Any, parse: Callable[[str], Any], rule: str) -> Any:
    try:
        return parse(_text(value))
    except ValueError:
        raise MisfitError(rule, value) from None


def _whole(moment: Any, unit: str, value: Any) -> Any:
    if moment.microsecond * _UNITS_A_SECOND[unit] % 10**6:
        raise MisfitError(f"a time in whole {unit}", value)
    return moment


# ---- nested ---------------------------------------------------------------------------------------------------


def _nested(arrow_type: pa.DataType) -> Convert | None:
    is_type = pa.types
    if is_type.is_struct(arrow_type):
        return _struct(arrow_type)
    if is_type.is_map(arrow_type):
        return _map(arrow_type)
    if is_type.is_fixed_size_list(arrow_type):
        return _list(arrow_type.value_field, arrow_type.list_size)
    if is_type.is_list(arrow_type) or is_type.is_large_list(arrow_type):
        return _list(arrow_type.value_field, None)
    if is_type.is_list_view(arrow_type) or is_type.is_large_list_view(arrow_type):
        return _list(arrow_type.value_field, None)
    return None


def _child(field: pa.Field) -> Convert | None:
    convert = converter(field.type)
    if convert is None:
        return None

    def convert_or_null(value: Any) -> Any:
        if value is not None:
            return convert(value)
        if not field.nullable:
            raise MisfitError("not null", None)
        return None

    return convert_or_null


def _list(field: pa.Field, size: int | None) -> Convert | None:
    convert = _child(field)
    if convert is None:
        return None

    def convert_list(values: Any) -> list[Any]:
        if not isinstance(values, list) or (size is not None and len(values) != size):
            raise MisfitError("a list" if size is None else f"a list of {size} values", values)
        done: list[Any] = []
        try:
            done.extend(map(convert, values))
        except MisfitError as misfit:
            raise MisfitError(
                misfit.rule, misfit.value, f"[{_first_misfit(values, convert)}]{misfit.path}"
            ) from None
        return done

    return convert_list


def _first_misfit(values: list[Any], convert: Convert) -> int:
    for index, value in enumerate(values):
        try:
            convert(value)
        except MisfitError:
            return index
    return len(values)


def _tensor(arrow_type: pa.FixedShapeTensorType) -> Convert | None:
    size = 1
    for length in arrow_type.shape:
        size *= length
    convert = _list(pa.field("item", arrow_type.value_type), size)

    def flatten(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise MisfitError("a list", value)
        return [each for part in value for each in (flatten(part) if isinstance(part, list) else [part])]

    return None if convert is None else lambda value: convert(flatten(value))


def _struct(arrow_type: pa.DataType) -> Convert | None:
    parts = {field.name: _child(field) for field in arrow_type}
    if None in parts.values():
        return None

    def convert(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or set(value) - set(parts):
            raise MisfitError(f"an object with keys among {list(parts)}", value)
        done = {}
        for name, part in parts.items():
            try:
                done[name] = part(value.get(name)) if part is not None else None
            except MisfitError as misfit:
                raise MisfitError(misfit.rule, misfit.value, f".{name}{misfit.path}") from None
        return done

    return convert


def _map(arrow_type: pa.DataType) -> Convert | None:
    convert_item = _child(arrow_type.item_field)
    if convert_item is None or not pa.types.is_string(arrow_type.key_type):
        return None

    def convert(value: Any) -> list[tuple[str, Any]]:
        if not isinstance(value, dict):
            raise MisfitError("an object", value)
        done = []
        for key, item in value.items():
            try:
                done.append((_text(key), convert_item(item)))
            except MisfitError as misfit:
                raise MisfitError(misfit.rule, misfit.value, f".{key}{misfit.path}") from None
        return done

    return convert
