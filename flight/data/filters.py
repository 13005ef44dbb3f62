"""Filters over rows as structured JSON, worked out by Arrow. It evaluates no code and knows no tables but a schema.

    {"column": "reward", "op": ">=", "value": 0.5}          op: = != < <= > >=
    {"column": "modality", "op": "in", "value": ["image", "audio"]}
    {"column": "image", "op": "is_null"}
    {"and": [...]}, {"or": [...]}, {"not": {...}}

Comparing a null is neither true nor false, as in SQL: such a row is left out, by `not` too. Only columns of plain
values (bool, numbers, strings, times) are compared; any column may be asked for nulls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flight.errors import InvalidRequestError

MAX_DEPTH = 16
MAX_CONDITIONS = 200
MAX_VALUES = 100_000
"""Values of one `in`."""

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
OPS = (*_COMPARE, "in", "is_null")


@dataclass(frozen=True, slots=True)
class Condition:
    """One column against one value; `value` is an Arrow scalar, an Arrow array for `in`, None for `is_null`."""

    column: str
    op: str
    value: pa.Scalar | pa.Array | None


@dataclass(frozen=True, slots=True)
class Combination:
    """`word` is "and", "or" or "not"; not has one part."""

    word: str
    parts: tuple[Filter, ...]


Filter = Condition | Combination


def parse_filter(where: str, document: Any, schema: pa.Schema) -> Filter:
    """Read a filter over columns of `schema`; `where` names the request in errors.

    Raises:
        InvalidRequestError: it is no filter, too large, or names a column, op or value that does not fit.
    """
    budget = iter(range(MAX_CONDITIONS))
    return _Reader(f"{where}: filter", schema, budget).read(document, 0)


def columns_of(condition: Filter) -> list[str]:
    """Return the columns that a filter looks at, each once."""
    if isinstance(condition, Condition):
        return [condition.column]
    return list(dict.fromkeys(name for part in condition.parts for name in columns_of(part)))


def matches(condition: Filter, rows: pa.Table) -> pa.Array:
    """Return for each row whether it passes, without nulls."""
    mask = pc.fill_null(_evaluate(condition, rows), False)
    return mask.combine_chunks() if isinstance(mask, pa.ChunkedArray) else mask


def _evaluate(condition: Filter, rows: pa.Table) -> Any:
    if isinstance(condition, Combination):
        masks = [_evaluate(part, rows) for part in condition.parts]
        if condition.word == "not":
            return pc.invert(masks[0])
        join = pc.and_kleene if condition.word == "and" else pc.or_kleene
        joined = masks[0]
        for mask in masks[1:]:
            joined = join(joined, mask)
        return joined
    values = rows.column(condition.column)
    if condition.op == "is_null":
        return pc.is_null(values)
    if condition.op == "in":
        found = pc.is_in(values, value_set=condition.value)
        return pc.if_else(pc.is_null(values), pa.scalar(None, pa.bool_()), found)
    return _COMPARE[condition.op](values, condition.value)


@dataclass(frozen=True, slots=True)
class _Reader:
    where: str
    schema: pa.Schema
    budget: Iterator[int]

    def read(self, document: Any, depth: int) -> Filter:
        if depth > MAX_DEPTH:
            raise InvalidRequestError(f"{self.where}: must be at most {MAX_DEPTH} levels deep, got more")
        if next(self.budget, None) is None:
            raise InvalidRequestError(
                f"{self.where}: must hold at most {MAX_CONDITIONS} conditions, got more"
            )
        if not isinstance(document, Mapping):
            raise InvalidRequestError(f"{self.where}: must be a JSON object, got {_short(document)}")
        keys = set(document)
        if len(keys) == 1 and keys <= {"and", "or", "not"}:
            return self._combination(*next(iter(document.items())), depth)
        if "column" in keys and keys <= {"column", "op", "value"}:
            return self._condition(document)
        raise InvalidRequestError(
            f"{self.where}: must have the keys column, op and value, or one of and, or, not, got {_short(document)}"
        )

    def _combination(self, word: str, parts: Any, depth: int) -> Filter:
        if word == "not":
            return Combination(word, (self.read(parts, depth + 1),))
        if not isinstance(parts, list) or not parts:
            raise InvalidRequestError(f"{self.where}: {word} must be a list of filters, got {_short(parts)}")
        return Combination(word, tuple(self.read(part, depth + 1) for part in parts))

    def _condition(self, document: Mapping[str, Any]) -> Condition:
        column, op, value = document["column"], document.get("op"), document.get("value")
        if column not in self.schema.names:
            raise InvalidRequestError(
                f"{self.where}: column must be one of {self.schema.names}, got {_short(column)}"
            )
        if op not in OPS:
            raise InvalidRequestError(
                f"{self.where} on {column!r}: op must be one of {list(OPS)}, got {_short(op)}"
            )
        arrow_type = self.schema.field(column).type
        if op == "is_null":
            if value is not None:
                raise InvalidRequestError(
                    f"{self.where} on {column!r}: value must be absent for is_null, got {_short(value)}"
                )
            return Condition(column, op, None)
        if not _is_plain(arrow_type):
            raise InvalidRequestError(
                f"{self.where} on {column!r}: op must be is_null for a column of type {arrow_type}, got {op!r}; "
                f"columns of plain values: {[each.name for each in self.schema if _is_plain(each.type)]}"
            )
        if op == "in":
            if not isinstance(value, list) or len(value) > MAX_VALUES:
                raise InvalidRequestError(
                    f"{self.where} on {column!r}: value of op 'in' must be a list of at most {MAX_VALUES} values, "
                    f"got {_short(value)}"
                )
            scalars = [self._scalar(column, op, each, arrow_type) for each in value]
            return Condition(column, op, pa.array([each.as_py() for each in scalars], arrow_type))
        return Condition(column, op, self._scalar(column, op, value, arrow_type))

    def _scalar(self, column: str, op: str, value: Any, arrow_type: pa.DataType) -> pa.Scalar:
        expected = _json_kind(arrow_type)
        fits = isinstance(value, expected) and (bool in expected or not isinstance(value, bool))
        try:
            if fits and pa.types.is_temporal(arrow_type):
                return pc.cast(pa.scalar(value), arrow_type)
            if fits:
                return pa.scalar(value, arrow_type)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            pass
        raise InvalidRequestError(
            f"{self.where} on {column!r}: value of op {op!r} must be a {arrow_type} as JSON, got {_short(value)}"
        )


def _is_plain(arrow_type: pa.DataType) -> bool:
    return (
        pa.types.is_boolean(arrow_type)
        or pa.types.is_integer(arrow_type)
        or pa.types.is_float32(arrow_type)
        or pa.types.is_float64(arrow_type)
        or pa.types.is_string(arrow_type)
        or pa.types.is_large_string(arrow_type)
        or pa.types.is_timestamp(arrow_type)
        or pa.types.is_date(arrow_type)
    )


def _json_kind(arrow_type: pa.DataType) -> tuple[type, ...]:
    if pa.types.is_boolean(arrow_type):
        return (bool,)
    if pa.types.is_integer(arrow_type):
        return (int,)
    if pa.types.is_floating(arrow_type):
        return (int, float)
    return (str,)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]} ..."
