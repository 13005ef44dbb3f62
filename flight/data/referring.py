"""What the rows of a batch refer to, as Python values: only columns that refer are looked at. No state."""

from __future__ import annotations

import pyarrow as pa

from flight.schema import TableSpec
from flight.state.references import Referring


def referring_in(spec: TableSpec, batch: pa.RecordBatch) -> list[Referring]:
    """Return the uids in each column of the batch that refers to another table; nulls refer to nothing."""
    if not spec.references():
        return []
    found = []
    for name in batch.schema.names:
        column = spec.columns_by_name[name]
        if not column.references:
            continue
        values = batch.column(name).to_pylist()
        if pa.types.is_string(column.type):
            values = [[value] for value in values]
        uids = [[uid for uid in row or () if uid is not None] for row in values]
        found.append(Referring(column=name, writer=column.writer, target=column.references, uids=uids))
    return found
