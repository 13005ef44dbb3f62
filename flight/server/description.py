"""A table as any Flight client sees it: its Arrow schema, with what is true of the whole table as schema metadata.

Field metadata hold meaning, unit, shape and writer of each column; schema metadata hold the rest of the specification,
one key a field, each value a small JSON text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import msgspec
import pyarrow as pa

from flight.schema import TableSpec

_NOT_NOTED = ("name", "columns")


def described_schema(spec: TableSpec) -> pa.Schema:
    """Return the Arrow schema of a table with consumers, limits and bounds as its metadata."""
    notes = {
        part.name: msgspec.json.encode(getattr(spec, part.name)).decode()
        for part in fields(spec)
        if part.compare and part.name not in _NOT_NOTED
    }
    return spec.arrow_schema().with_metadata({"table": spec.name} | notes)


@contextmanager
def bare_errors() -> Iterator[None]:
    """Keep tracebacks from the wire: those of GetSchema alone would be in the error's details (pyarrow 26)."""
    try:
        yield
    except Exception as error:
        raise GetSchemaError(str(error)) from None


class GetSchemaError(Exception):
    """An error that Arrow can name but not print."""

    @property
    def __cause__(self) -> BaseException | None:  # type: ignore[override]  # an attribute there
        raise AttributeError("a bare error tells nothing of where it was raised")
