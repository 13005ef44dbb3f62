"""Rows and columns of a table as one Arrow table: key columns first, then the columns asked for. No state."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from flight.data.store import Place, gather, joined
from flight.schema import TableSpec
from flight.state.cursor import Row
from flight.state.marks import Computed

Places = dict[str, list[Place | None]]
"""Where the values of each column lie, row by row."""


def project(
    spec: TableSpec,
    rows: Sequence[Row],
    places: Places,
    *,
    attempts: Sequence[int] | None = None,
    computed: Computed = (),
) -> pa.Table:
    """Gather the columns of `places` behind row_id, uid, group_id and, for rows that were taken, attempt.

    `computed` columns come next, unless the table has one of that name and it was asked for.
    """
    schema = spec.arrow_schema()
    arrays: list[pa.Array | pa.ChunkedArray] = [
        pa.array([row.row_id for row in rows], pa.int64()),
        pa.array([row.uid for row in rows], pa.string()),
        pa.array([row.group_id for row in rows], pa.string()),
    ]
    fields = [schema.field(name) for name in ("row_id", "uid", "group_id")]
    if attempts is not None:
        arrays.append(pa.array(attempts, pa.int32()))
        fields.append(
            pa.field(
                "attempt",
                pa.int32(),
                metadata={"meaning": "how often the row was delivered, this time included"},
            )
        )
    for field, values in computed:
        if field.name not in places:
            arrays.append(values)
            fields.append(field)
    for name, where in places.items():
        arrays.append(gather(where, name, schema.field(name).type))
        fields.append(schema.field(name))
    return joined(pa.Table.from_arrays(arrays, schema=pa.schema(fields)))
