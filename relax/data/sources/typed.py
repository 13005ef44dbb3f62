"""What files with typed columns share: which columns are read, a row as plain values, names of class labels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from relax.data.errors import LineError


def chosen_columns(schema: pa.Schema, columns: Sequence[str]) -> list[str]:
    """Return those of `columns` that the file has."""
    return [name for name in schema.names if name in columns]


def class_labels(schema: pa.Schema) -> dict[str, list[str]]:
    """Return the names of the classes by column, as the `datasets` library notes them in the schema."""
    try:
        noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = noted["info"]["features"]
        return {
            column: feature["names"]
            for column, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names")
        }
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


def plain_row(
    rows: pa.RecordBatch | pa.Table, at: int, labels: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Return one row; a whole number of a class label is its name, any other whole number its digits.

    A column's type says that its values are numbers, so that "4" is no guess, as it would be in JSON.

    Raises:
        LineError: the values are damaged.
    """
    try:
        one = rows.slice(at, 1)
        one.validate(full=True)
        row = one.to_pylist()[0]
        for name, value in row.items():
            if isinstance(value, int) and not isinstance(value, bool):
                row[name] = labels[name][value] if name in labels and value >= 0 else str(value)
    except (pa.ArrowException, ValueError, IndexError) as error:
        raise LineError(f"row must be readable, got {str(error).splitlines()[0]}") from error
    return row
