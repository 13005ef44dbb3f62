"""What may change in a table that is in use: columns may be added if rows without them are whole. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from flight.errors import SchemaMismatchError
from flight.schema import Column, ConsumerSpec, TableSpec


def evolve(spec: TableSpec, columns: Sequence[Column], consumers: Sequence[ConsumerSpec]) -> TableSpec:
    """Return `spec` with these columns and consumers; those that are there already, and the same, change nothing.

    Raises:
        SchemaMismatchError: one that is there would change, or a new column is not nullable.
        InvalidRequestError: the table would not be a valid one.
    """
    faults: list[str] = []
    for column in columns:
        have = spec.columns_by_name.get(column.name)
        if have is not None:
            faults += [f"column {column.name!r}: {change}" for change in _changes(have, column)]
        elif not column.nullable:
            faults.append(
                f"column {column.name!r}: expected nullable, for rows that are there have none, got not nullable"
            )
    by_name = {consumer.name: consumer for consumer in spec.consumers}
    for consumer in consumers:
        if consumer.name in by_name:
            changes = _changes(by_name[consumer.name], consumer)
            faults += [f"consumer {consumer.name!r}: {change}" for change in changes]
        # Samplers look at values as they are put; of rows that are there, only what was watched so far is known.
        unknown = consumer.label_columns() & spec.columns_by_name.keys() - set(spec.label_columns())
        if unknown:
            faults.append(
                f"consumer {consumer.name!r}: expected mix and skip_equal of new columns or of {spec.label_columns()}, "
                f"got {sorted(unknown)}"
            )
    if faults:
        raise SchemaMismatchError(
            f"alter {spec.name}: columns and consumers must be new or the same as they are, "
            f"got {len(faults)} difference(s): " + "; ".join(faults)
        )
    return replace(
        spec,
        columns=(*spec.columns, *(each for each in columns if each.name not in spec.columns_by_name)),
        consumers=(*spec.consumers, *(each for each in consumers if each.name not in by_name)),
    )


def _changes(have: Column | ConsumerSpec, got: Column | ConsumerSpec) -> list[str]:
    return [
        f"expected {part.name} {_shown(getattr(have, part.name))}, got {_shown(getattr(got, part.name))}"
        for part in fields(have)
        if part.compare and getattr(have, part.name) != getattr(got, part.name)
    ]


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str | tuple) else str(value)
