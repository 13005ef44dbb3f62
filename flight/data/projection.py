"""Rows and columns of a table as one Arrow table: key columns first, then the columns asked for. No state."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import pyarrow as pa

from flight.data.store import Run, gather, joined
from flight.schema import TableSpec
from flight.state.leases import Row
from flight.state.marks import Computed
from flight.storage.messages import Endpoint
from flight.storage.stubs import noted, split

ATTEMPT = pa.field(
    "attempt", pa.int32(), metadata={"meaning": "how often the row was delivered, this time included"}
)
Places = dict[str, list[Run]]
"""Where the values of each column lie; columns of one part share them."""


def project(
    spec: TableSpec,
    rows: Sequence[Row],
    places: Places,
    *,
    attempts: Sequence[int] | None = None,
    computed: Computed = (),
    owners: Mapping[int, str] | None = None,
) -> pa.Table:
    """Gather the columns of `places` behind row_id, uid, group_id and, for rows that were taken, attempt.

    `computed` columns come next, unless the table has one of that name and it was asked for. If there are storage
    servers (`owners`: their locations), columns of which they have values are left out, and noted in the metadata.
    """
    schema = spec.arrow_schema()
    here = places
    endpoints: list[Endpoint] = []
    if owners:
        here, endpoints = split(spec, places, owners)
    uids, group_ids = [row.uid for row in rows], [row.group_id for row in rows]
    uid_column = pa.array(uids, pa.string())
    arrays: list[pa.Array | pa.ChunkedArray] = [
        _integers([row.row_id for row in rows], pa.int64()),
        uid_column,
        uid_column if group_ids == uids else pa.array(group_ids, pa.string()),
    ]
    fields = [schema.field(name) for name in ("row_id", "uid", "group_id")]
    if attempts is not None:
        arrays.append(_integers(attempts, pa.int32()))
        fields.append(ATTEMPT)
    for field, values in computed:
        if field.name not in places:
            arrays.append(values)
            fields.append(field)
    first = len(fields)
    for name, where in here.items():
        arrays.append(gather(where, name, schema.field(name).type))
        fields.append(schema.field(name))
    answer = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
    if any(len(runs) > 1 for runs in here.values()):
        answer = joined(answer)
    if not endpoints:
        return answer
    whole = pa.schema([*fields[:first], *(schema.field(name) for name in places)])
    return noted(answer, spec.name, whole, endpoints)


def _integers(values: Sequence[int], arrow_type: pa.DataType) -> pa.Array:
    """Return Python integers as an Arrow array, in half of the time that `pa.array` takes to find out what they are."""
    packed = array("q" if arrow_type == pa.int64() else "i", values)
    return pa.Array.from_buffers(arrow_type, len(packed), [None, pa.py_buffer(packed)])
