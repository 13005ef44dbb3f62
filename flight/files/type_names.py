"""Arrow types by name, as people write them and as Arrow prints them. No state.

    int32, string, bool, float (float32), double (float64), binary, timestamp[us, UTC], date32, decimal128(10, 2)
    list<int32>, large_list<float>, fixed_size_list<float>[3], fixed_size_binary[16]
    struct<x: int32, y: list<string>>, map<string, int32>, fixed_shape_tensor<float>[2, 3], uuid, json, bool8

What `str()` of an Arrow type prints is understood too, so that a printed schema can be pasted.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence

import pyarrow as pa

from flight.errors import InvalidRequestError

_LISTS: dict[str, Callable[[pa.Field], pa.DataType]] = {
    "list": pa.list_,
    "large_list": pa.large_list,
    "list_view": pa.list_view,
    "large_list_view": pa.large_list_view,
}
_DECIMALS: dict[str, Callable[[int, int], pa.DataType]] = {
    "decimal32": pa.decimal32,
    "decimal64": pa.decimal64,
    "decimal128": pa.decimal128,
    "decimal256": pa.decimal256,
}
_EXTENSIONS: dict[str, Callable[[], pa.DataType]] = {
    "uuid": pa.uuid,
    "json": pa.json_,
    "bool8": pa.bool8,
}
_NESTED = ("fixed_size_list", "fixed_size_binary", "fixed_shape_tensor", "struct", "map", "timestamp")
_PLAIN = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *(
        "float16",
        "float32",
        "float64",
        "halffloat",
        "float",
        "double",
        "string",
        "large_string",
        "string_view",
    ),
    *("binary", "large_binary", "binary_view", "date32", "date64", "time32", "time64", "duration"),
)
TYPE_NAMES = (*_PLAIN, *_LISTS, *_NESTED, *_DECIMALS, *_EXTENSIONS)
"""What a type name may begin with; error messages choose from it."""

MAX_CHARS = 1000
"""Longest name that is read; deeper nesting than that is a mistake."""

_UNITS = ("s", "ms", "us", "ns")
_WORD = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)")
_FIELD_NAME = re.compile(r"\s*([^<>,:]+):\s*")
_PRINTED_EXTENSION = re.compile(r"extension<arrow\.(\w+)>")
_PRINTED_TENSOR = re.compile(
    r"extension<arrow\.fixed_shape_tensor\[value_type=([^\[\]]+), shape=\[([0-9,]+)\]\]>"
)


def parse_type(name: str, *, where: str) -> pa.DataType:
    """Return the Arrow type of a name; `where` says whose type it is in errors.

    Raises:
        InvalidRequestError: it is no type; the message shows the place and the nearest type.
    """
    if len(name) > MAX_CHARS:
        raise InvalidRequestError(
            f"{where}: type must be at most {MAX_CHARS} characters, got {len(name)}: {name[:40]!r} ..."
        )
    parser = _Parser(_unprinted(name), where)
    found = parser.type()
    parser.end()
    return found


def _unprinted(name: str) -> str:
    """Return a name without the brackets that Arrow prints around extension types."""
    return _PRINTED_EXTENSION.sub(r"\1", _PRINTED_TENSOR.sub(r"fixed_shape_tensor<\1>[\2]", name))


class _Parser:
    def __init__(self, text: str, where: str) -> None:
        self._text = text
        self._where = where
        self._at = 0

    def type(self) -> pa.DataType:
        word = self._word()
        if word in _LISTS:
            return _LISTS[word](self._element())
        if word == "struct":
            return pa.struct(self._struct_fields())
        if word == "map":
            self._expect("<")
            key = self.type()
            self._expect(",")
            value = self._nullable_field("value")
            self._expect(">")
            return pa.map_(key, value)
        if word == "fixed_size_list":
            element = self._element()
            return pa.list_(element, self._sizes(1)[0])
        if word == "fixed_shape_tensor":
            self._expect("<")
            value_type = self.type()
            self._expect(">")
            return pa.fixed_shape_tensor(value_type, self._sizes(None))
        if word == "fixed_size_binary":
            return pa.binary(self._sizes(1)[0])
        if word in _DECIMALS:
            return self._decimal(word)
        if word == "timestamp":
            return self._timestamp()
        if word in _EXTENSIONS:
            return _EXTENSIONS[word]()
        return self._plain(word)

    def end(self) -> None:
        """Refuse what is left over."""
        if self._text[self._at :].strip():
            raise self._fault("nothing more")

    # ---- kinds ------------------------------------------------------------------------------------------------

    def _plain(self, word: str) -> pa.DataType:
        alias = word
        unit = self._bracketed()
        if unit is not None:
            alias = f"{word}[{unit}]"
        try:
            return pa.type_for_alias(alias)
        except ValueError:
            nearest = difflib.get_close_matches(word, TYPE_NAMES, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"one of {', '.join(TYPE_NAMES)}"
            if word in ("time32", "time64", "duration"):
                hint = f"write {word} with its unit, such as {word}[{'ms' if word == 'time32' else 'us'}]"
            raise InvalidRequestError(
                f"{self._where}: type must be the name of an Arrow type, got {self._text!r}; {hint}"
            ) from None

    def _timestamp(self) -> pa.DataType:
        unit, _, zone = (self._bracketed() or "").partition(",")
        zone = zone.strip().removeprefix("tz=")
        if unit.strip() not in _UNITS:
            raise self._fault(
                f"timestamp[UNIT] or timestamp[UNIT, ZONE] with UNIT one of {', '.join(_UNITS)}"
            )
        return pa.timestamp(unit.strip(), zone or None)

    def _decimal(self, word: str) -> pa.DataType:
        match = re.compile(r"\s*\(\s*(\d+)\s*,\s*(-?\d+)\s*\)").match(self._text, self._at)
        if match is None:
            raise self._fault(f"{word}(PRECISION, SCALE)")
        self._at = match.end()
        try:
            return _DECIMALS[word](int(match[1]), int(match[2]))
        except (ValueError, pa.ArrowInvalid) as error:
            raise self._fault(f"a decimal that Arrow knows ({error})") from None

    def _element(self) -> pa.Field:
        self._expect("<")
        element = self._nullable_field("item")
        self._expect(">")
        return element

    def _nullable_field(self, default_name: str) -> pa.Field:
        """Read `TYPE`, or as Arrow prints it `NAME: TYPE` or `NAME: TYPE not null`."""
        name = self._field_name() or default_name
        found = self.type()
        is_required = re.compile(r"\s+not null").match(self._text, self._at)
        if is_required is not None:
            self._at = is_required.end()
        return pa.field(name, found, nullable=is_required is None)

    def _struct_fields(self) -> list[pa.Field]:
        self._expect("<")
        found = []
        while True:
            if _FIELD_NAME.match(self._text, self._at) is None:
                raise self._fault("a field as NAME: TYPE")
            found.append(self._nullable_field(""))
            if not self._accepts(","):
                self._expect(">")
                return found

    # ---- characters -------------------------------------------------------------------------------------------

    def _field_name(self) -> str | None:
        match = _FIELD_NAME.match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        return match[1].strip()

    def _word(self) -> str:
        match = _WORD.match(self._text, self._at)
        if match is None:
            raise self._fault("the name of an Arrow type")
        self._at = match.end()
        return match[1]

    def _bracketed(self) -> str | None:
        """Return what stands between square brackets here, None if there are none."""
        match = re.compile(r"\s*\[([^\]]*)\]").match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        return match[1].strip()

    def _sizes(self, num_sizes: int | None) -> Sequence[int]:
        text = self._bracketed() or ""
        sizes = [int(part) for part in text.split(",") if part.strip().isdigit()]
        if len(sizes) != (num_sizes or text.count(",") + 1):
            raise self._fault("sizes in brackets, such as [3] or [2, 3]")
        return sizes

    def _accepts(self, char: str) -> bool:
        match = re.compile(rf"\s*{re.escape(char)}").match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return match is not None

    def _expect(self, char: str) -> None:
        if not self._accepts(char):
            raise self._fault(repr(char))

    def _fault(self, rule: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"{self._where}: type must have {rule} at character {self._at + 1}, got {self._text!r}"
        )
