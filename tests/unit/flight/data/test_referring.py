"""What the rows of a batch refer to."""

from __future__ import annotations

import pyarrow as pa

from flight.data.referring import referring_in
from flight.schema import Column, TableSpec
from flight.state.references import Referring


def test_only_columns_that_refer_are_looked_at():
    """One uid a row or several; null, and null in a list, refer to nothing; absent columns too."""
    strings = pa.list_(pa.string())
    columns = (
        Column(name="ids", type=strings, meaning="media", writer="a", references="media"),
        Column(name="mask", type=pa.string(), meaning="mask", writer="b", references="masks"),
        Column(name="plain", type=pa.string(), meaning="text", writer="a"),
    )
    spec = TableSpec(name="rows", columns=columns, consumers=())
    batch = pa.record_batch(
        {
            "ids": pa.array([["x", None, "y"], None, []], strings),
            "mask": pa.array(["m", None, "n"]),
            "plain": ["p"] * 3,
        }
    )
    assert referring_in(spec, batch) == [
        Referring(column="ids", writer="a", target="media", uids=[["x", "y"], [], []]),
        Referring(column="mask", writer="b", target="masks", uids=[["m"], [], ["n"]]),
    ]
    assert referring_in(spec, batch.select(["plain"])) == []
