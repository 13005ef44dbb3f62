"""Tables declared in a YAML file, for a server that nobody's program has to set up. It opens no socket.

    server: {capacity_bytes: 4 GiB}
    tables:
      questions:
        columns:
          text: {type: string, meaning: the question, writer: preprocess}
        consumers:
          answer: {columns: [text]}

The keys of a table, a column, a consumer, `staleness` and `tickets` are the fields of the classes in `flight.schema`;
columns and consumers go by name, types are names of Arrow types (`flight.files.type_names`), sizes may have a unit
(64 MiB). Every refusal names the file, the line, the table, what was expected, what came, and the nearest choice.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Collection
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import msgspec
import pyarrow as pa
import yaml

from flight.errors import InvalidRequestError
from flight.files.type_names import parse_type
from flight.journal.config import JournalConfig
from flight.schema import KEY_COLUMNS, Column, TableSpec

MAX_FILE_BYTES = 1 << 20
"""Largest file that is read; one table needs a few kilobytes."""

_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What `python -m flight serve --config` needs to know.

    capacity_bytes: of all tables together; None for no bound but the tables' own.
    spill_dir: where tables with `spill` may write; None if nowhere.
    journal: where the server writes down what it must not forget; None if nowhere.
    """

    tables: tuple[TableSpec, ...]
    capacity_bytes: int | None = None
    spill_dir: str | None = None
    journal: JournalConfig | None = None


def load_config(path: Path, *, known_tables: Collection[str] = ()) -> ServerConfig:
    """Read the tables that a file declares, in its order, and the settings of their server.

    `known_tables` are tables that exist already, which the file's tickets may name.

    Raises:
        InvalidRequestError: the file cannot be read, or a table in it could never work.
    """
    document = _read(path)
    root = _Place(str(path), document, "file")
    root.refuse_unknown(("server", "tables"))
    declared = root.mapping("tables", "tables by name")
    specs = []
    for name in declared:
        place = _Place(str(path), declared[name], f"table {str(name)!r}", declared.lines[name])
        specs.append(_table(place, str(name), {*map(str, declared), *known_tables}))
    if root.values.get("server") is None:
        return ServerConfig(tables=tuple(specs))
    config: ServerConfig = _build(root.inside("server"), ServerConfig, tables=tuple(specs))
    if config.capacity_bytes is not None and config.capacity_bytes <= 0:
        root.inside("server").fault(
            "capacity_bytes", "capacity_bytes", "positive", str(config.capacity_bytes), []
        )
    return config


def load_tables(path: Path, *, known_tables: Collection[str] = ()) -> list[TableSpec]:
    """Read the tables alone; see `load_config`."""
    return list(load_config(path, known_tables=known_tables).tables)


def _table(place: _Place, name: str, tables: Collection[str]) -> TableSpec:
    place.refuse_unknown([key for key in _settable(TableSpec) if key != "name"])
    columns = tuple(
        _column(each, column, tables) for column, each in place.named("columns", "columns by name", "column")
    )
    names = [column.name for column in columns]
    values: dict[str, Any] = {"name": name, "columns": columns}
    hints = get_type_hints(TableSpec)
    (consumer_kind, *_) = get_args(hints["consumers"])
    values["consumers"] = tuple(
        _build(each, consumer_kind, name=consumer, columns=names)
        for consumer, each in (
            # An explicit {} is a table whose rows nobody takes: they are read, or referred to.
            []
            if place.values.get("consumers") == {}
            else place.named("consumers", "consumers by name", "consumer")
        )
    )
    consumers = [consumer.name for consumer in values["consumers"]]
    for key in _settable(TableSpec):
        if key not in values and key in place.values:
            values[key] = _value(place, key, hints[key])
    if values.get("staleness") is not None:
        place.inside("staleness").one_of("consumer", consumers)
    if values.get("tickets") is not None:
        place.inside("tickets").one_of("table", tables)
        place.inside("tickets").one_of("consumer", consumers)
    try:
        return TableSpec(**values)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{place.file}:{place.line}: {error}") from None


def _column(place: _Place, name: str, tables: Collection[str]) -> Column:
    place.one_of("references", tables)
    if isinstance(place.values.get("shape"), list):
        # `shape: [num_tokens]` is a list to YAML and a text to people.
        place.values["shape"] = f"[{', '.join(str(size) for size in place.values['shape'])}]"
    return _build(place, Column, name=name)


def _build(place: _Place, kind: Any, *, columns: Collection[str] | None = None, **given: Any) -> Any:
    """Make a specification from a mapping; `given` are the fields that the mapping's place already tells."""
    hints = get_type_hints(kind)
    allowed = [key for key in _settable(kind) if key not in given]
    place.refuse_unknown(allowed)
    for key, part in _settable(kind).items():
        if key in place.values and key not in given:
            given[key] = _value(place, key, hints[key])
        elif key not in given and part.default is MISSING and part.default_factory is MISSING:
            place.fault(None, key, "given", "nothing", [])
    if columns is not None:
        for column in given["columns"]:
            if column not in columns and column not in KEY_COLUMNS:
                place.fault("columns", "columns", f"among {list(columns)}", repr(column), columns, column)
    return kind(**given)


def _value(place: _Place, key: str, hint: Any) -> Any:
    """Return the value of one key as the type that its field has."""
    value = place.values[key]
    choices = [each for each in get_args(hint) if each is not type(None)]
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        if len(choices) == 1:
            hint = choices[0]
    if is_dataclass(hint):
        return _build(place.inside(key), hint)
    if hint is pa.DataType:
        return _arrow_type(place, key)
    if get_origin(hint) is Literal and value not in get_args(hint):
        allowed = [str(each) for each in get_args(hint)]
        place.fault(key, key, f"one of {', '.join(allowed)}", repr(value), allowed, value)
    if key.endswith("_bytes") and isinstance(value, str):
        return _size(place, key, value)
    if hint is str and value is None:
        return ""
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        place.fault(key, key, _WORDS.get(hint, f"as its field says ({error})"), repr(value), [])


def _arrow_type(place: _Place, key: str) -> pa.DataType:
    where = f"{place.file}:{place.line_of(key)}: {place.name}"
    if not isinstance(place.values[key], str):
        place.fault(key, key, "the name of an Arrow type", repr(place.values[key]), [])
    return parse_type(place.values[key], where=where)


def _size(place: _Place, key: str, text: str) -> int:
    number, _, unit = text.strip().partition(" ")
    try:
        return int(float(number) * _BYTES[unit.strip()])
    except (KeyError, ValueError, OverflowError):
        return place.fault(key, key, f"bytes, or a number and one of {', '.join(_BYTES)}", repr(text), [])


def _settable(kind: Any) -> dict[str, Field[Any]]:
    return {part.name: part for part in fields(kind) if part.init}


class _Lines(dict):
    """A mapping that knows the line of the file on which each of its keys stands."""

    lines: dict[Any, int]


class _Place:
    """A mapping in the file, and how errors call it."""

    def __init__(self, file: str, values: Any, name: str, line: int = 1) -> None:
        self.file = file
        self.name = name
        self.line = line
        if not isinstance(values, _Lines):
            raise InvalidRequestError(f"{file}:{line}: {name} must be keys with values, got {values!r}")
        self.values = values

    def line_of(self, key: Any) -> int:
        return self.values.lines.get(key, self.line)

    def inside(self, key: str) -> _Place:
        return _Place(self.file, self.values[key], f"{self.name}: {key}", self.line_of(key))

    def mapping(self, key: str, what: str) -> _Lines:
        found = self.values.get(key)
        if not isinstance(found, _Lines) or not found:
            self.fault(key, key, what, repr(found), [])
        return found

    def named(self, key: str, what: str, each: str) -> list[tuple[str, _Place]]:
        """Return the named parts under a key with their places."""
        found = self.mapping(key, what)
        return [
            (
                str(name),
                _Place(self.file, found[name], f"{self.name}: {each} {str(name)!r}", found.lines[name]),
            )
            for name in found
        ]

    def refuse_unknown(self, allowed: Collection[str]) -> None:
        for key in self.values:
            if key not in allowed:
                self.fault(key, "key", f"one of {', '.join(allowed)}", repr(key), allowed, key)

    def one_of(self, key: str, choices: Collection[str]) -> None:
        """Refuse a name that is given and not among the choices."""
        value = self.values.get(key)
        if value and value not in choices:
            self.fault(key, key, f"one of {sorted(choices)}", repr(value), choices, value)

    def fault(
        self, key: Any, what: str, rule: str, got: str, choices: Collection[str], value: Any = None
    ) -> NoReturn:
        nearest = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise InvalidRequestError(
            f"{self.file}:{self.line_of(key)}: {self.name}: {what} must be {rule}, got {got}{hint}"
        )


class _Loader(yaml.SafeLoader):
    """Plain YAML whose mappings know their lines and hold no key twice."""

    def mapping(self, node: yaml.MappingNode) -> _Lines:
        own: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int) or key in own:
                rule = "given once" if isinstance(key, str | int) else "text"
                raise yaml.MarkedYAMLError(
                    problem=f"keys must be {rule}, got {key!r}", problem_mark=key_node.start_mark
                )
            own.add(key)
        self.flatten_mapping(node)
        found = _Lines()
        found.lines = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            found[key] = self.construct_object(value_node, deep=True)
            found.lines[key] = key_node.start_mark.line + 1
        return found


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.mapping)


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidRequestError(
                f"{path}: file must be at most {MAX_FILE_BYTES} bytes, got {path.stat().st_size}"
            )
        return yaml.load(path.read_text("utf-8"), _Loader)  # a SafeLoader: plain values only
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path}: file must be readable text, got: {error}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InvalidRequestError(f"{path}:{line}: file must be valid YAML, got: {error.problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidRequestError(f"{path}: file must be valid YAML, got: {error}") from error
