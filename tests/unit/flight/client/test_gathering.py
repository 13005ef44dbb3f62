"""An answer put together from several places."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from flight.client.gathering import gather_rows
from flight.storage.addresses import to_runs
from flight.storage.messages import Endpoint
from flight.storage.stubs import noted

SCHEMA = pa.schema(
    [("row_id", pa.int64()), ("uid", pa.string()), ("x", pa.string()), ("n", pa.int32()), ("y", pa.string())]
)


def whole(num_rows: int) -> pa.Table:
    """Return rows; y has a null wherever nobody has it."""
    row_ids = [10 * row for row in range(num_rows)]
    return pa.table(
        {
            "row_id": pa.array(row_ids, pa.int64()),
            "uid": [f"u{each}" for each in row_ids],
            "x": [f"x{each}" for each in row_ids],
            "n": pa.array(row_ids, pa.int32()),
            "y": pa.array([f"y{each}" for each in row_ids], pa.string()),
        },
        schema=SCHEMA,
    )


def answer_of(table: pa.Table, columns: list[str], owner_of: list[int]) -> list[Endpoint]:
    """Return who has columns of which rows; owner -1 is nobody."""
    owners = np.array(owner_of)
    return [
        Endpoint(owner=owner, columns=columns, positions=to_runs(np.flatnonzero(owners == owner)))
        for owner in sorted(set(owner_of) - {-1})
    ]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_gathered_rows_are_the_rows_wherever_they_lie(data):
    """In any split, with parts that have not come, rows that are gone, and answers in another order."""
    num_rows = data.draw(st.integers(1, 12))
    table = whole(num_rows)
    places = st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows)
    x_at, y_at = data.draw(places), [owner - 1 for owner in data.draw(places)]
    gone = data.draw(st.sets(st.tuples(st.integers(0, 3), st.integers(0, num_rows - 1)), max_size=4))
    is_reversed = data.draw(st.booleans())
    endpoints = answer_of(table, ["x"], x_at) + answer_of(table, ["y"], y_at)
    answer = noted(table.select(["row_id", "uid", "n"]), "rows", SCHEMA, endpoints)

    def fetch(part):
        kept = [at for at in part.positions.tolist() if (part.endpoint.owner, at) not in gone]
        found = table.take(pa.array(kept[::-1] if is_reversed else kept, pa.int64())).select(
            ["row_id", *part.endpoint.columns]
        )
        return found if kept else None

    found, num_missing = gather_rows(answer, fetch)
    lost = {
        row
        for row in range(num_rows)
        if (x_at[row], row) in gone or (y_at[row] >= 0 and (y_at[row], row) in gone)
    }
    expected = [
        each | {"y": each["y"] if y_at[row] >= 0 else None}
        for row, each in enumerate(table.to_pylist())
        if row not in lost
    ]
    assert (found.to_pylist(), num_missing) == (expected, len(lost))
    assert found.schema.equals(SCHEMA)


def test_gathered_values_are_not_copied():
    """Pieces are slices of what came, as long as they are large."""
    data = pa.array([b"x" * (1 << 20)] * 4)
    schema = pa.schema([("row_id", pa.int64()), ("uid", pa.string()), ("x", pa.binary())])
    keys = pa.table({"row_id": pa.array([0, 1, 2, 3], pa.int64()), "uid": ["a", "b", "c", "d"]})
    endpoints = [
        Endpoint(owner=1, columns=["x"], positions=[(0, 1), (3, 1)]),
        Endpoint(owner=2, columns=["x"], positions=[(1, 2)]),
    ]
    sources = {
        1: pa.table({"row_id": [0, 3], "x": data.slice(0, 2)}),
        2: pa.table({"row_id": [1, 2], "x": data.slice(2)}),
    }
    found, _ = gather_rows(noted(keys, "rows", schema, endpoints), lambda part: sources[part.endpoint.owner])
    assert {chunk.buffers()[2].address for chunk in found["x"].chunks} == {data.buffers()[2].address}
