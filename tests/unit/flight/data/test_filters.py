"""Filters: right rows, whole refusals, and the same answer as Python on random expressions."""

from __future__ import annotations

import datetime
import operator

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flight.data.filters import columns_of, matches, parse_filter
from flight.errors import InvalidRequestError

TABLE = pa.table(
    {
        "reward": pa.array([0.0, 0.5, 1.0, None], pa.float32()),
        "epoch": pa.array([0, 1, 2, 3], pa.int32()),
        "modality": ["image", "audio", None, "text"],
        "tokens": pa.array([[1], None, [2], [3]], pa.list_(pa.int32())),
        "good": [True, False, None, True],
        "made": pa.array([datetime.datetime(2026, 1, day, tzinfo=datetime.UTC) for day in (1, 2, 3, 4)]),
    }
)


def rows_of(document) -> list[int]:
    """Return the rows of the table that pass."""
    mask = matches(parse_filter("read t", document, TABLE.schema), TABLE)
    return [index for index, passes in enumerate(mask.to_pylist()) if passes]


@pytest.mark.parametrize(
    ("document", "rows"),
    [
        ({"column": "reward", "op": ">=", "value": 0.5}, [1, 2]),
        ({"column": "reward", "op": "<", "value": 1}, [0, 1]),
        ({"column": "epoch", "op": "!=", "value": 2}, [0, 1, 3]),
        ({"column": "modality", "op": "in", "value": ["image", "text"]}, [0, 3]),
        ({"not": {"column": "modality", "op": "in", "value": ["image", "text"]}}, [1]),
        ({"column": "tokens", "op": "is_null"}, [1]),
        ({"not": {"column": "tokens", "op": "is_null"}}, [0, 2, 3]),
        ({"column": "good", "op": "=", "value": True}, [0, 3]),
        ({"not": {"column": "reward", "op": "<", "value": 0.5}}, [1, 2]),
        ({"column": "made", "op": ">", "value": "2026-01-02T00:00:00Z"}, [2, 3]),
        (
            {
                "or": [
                    {
                        "and": [
                            {"column": "epoch", "op": ">", "value": 0},
                            {"column": "epoch", "op": "<=", "value": 1},
                        ]
                    },
                    {"column": "modality", "op": "is_null"},
                ]
            },
            [1, 2],
        ),
        ({"column": "epoch", "op": "in", "value": []}, []),
    ],
)
def test_filter_keeps_the_rows_that_match(document, rows):
    """Nulls are neither equal nor unequal, as in SQL."""
    assert rows_of(document) == rows


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"column": "pixels", "op": "=", "value": 1},
            "read t: filter: column must be one of ['reward', 'epoch', 'modality', 'tokens', 'good', 'made'], "
            "got 'pixels'",
        ),
        (
            {"column": "epoch", "op": "~", "value": 1},
            "read t: filter on 'epoch': op must be one of ['=', '!=', '<', '<=', '>', '>=', 'in', 'is_null'], got '~'",
        ),
        (
            {"column": "epoch", "op": "=", "value": "one"},
            "read t: filter on 'epoch': value of op '=' must be a int32 as JSON, got 'one'",
        ),
        (
            {"column": "epoch", "op": "=", "value": 2**40},
            "read t: filter on 'epoch': value of op '=' must be a int32 as JSON, got 1099511627776",
        ),
        (
            {"column": "epoch", "op": "=", "value": True},
            "read t: filter on 'epoch': value of op '=' must be a int32 as JSON, got True",
        ),
        (
            {"column": "tokens", "op": "=", "value": [1]},
            "read t: filter on 'tokens': op must be is_null for a column of type list<item: int32>, got '='; "
            "columns of plain values: ['reward', 'epoch', 'modality', 'good', 'made']",
        ),
        (
            {"column": "epoch", "op": "in", "value": 1},
            "read t: filter on 'epoch': value of op 'in' must be a list of at most 100000 values, got 1",
        ),
        ({"and": []}, "read t: filter: and must be a list of filters, got []"),
        (
            {"xor": []},
            "read t: filter: must have the keys column, op and value, or one of and, or, not, got {'xor': []}",
        ),
        ({"not": [1]}, "read t: filter: must be a JSON object, got [1]"),
    ],
)
def test_filter_that_does_not_fit_is_refused_by_name(document, message):
    """Column, op and value are named, and what is allowed."""
    with pytest.raises(InvalidRequestError) as caught:
        rows_of(document)
    assert str(caught.value) == message


def test_filter_has_limits():
    """Neither depth nor size can be used to hurt the server."""
    deep = {"column": "epoch", "op": "=", "value": 1}
    for _ in range(40):
        deep = {"not": deep}
    with pytest.raises(InvalidRequestError, match="must be at most 16 levels deep, got more"):
        rows_of(deep)
    with pytest.raises(InvalidRequestError, match="must hold at most 200 conditions, got more"):
        rows_of({"or": [{"column": "epoch", "op": "=", "value": 1}] * 300})


PYTHON = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
CONDITIONS = st.builds(
    lambda column, op, value: {"column": column, "op": op, "value": value},
    st.sampled_from(["a", "b"]),
    st.sampled_from(list(PYTHON)),
    st.integers(-2, 2),
)
DOCUMENTS = st.recursive(
    CONDITIONS,
    lambda inner: (
        st.builds(
            lambda word, parts: {word: parts},
            st.sampled_from(["and", "or"]),
            st.lists(inner, min_size=1, max_size=3),
        )
        | st.builds(lambda part: {"not": part}, inner)
    ),
    max_leaves=8,
)


def truth(document, row) -> bool | None:
    """SQL's three-valued logic in plain Python."""
    if "column" in document:
        value = row[document["column"]]
        return None if value is None else PYTHON[document["op"]](value, document["value"])
    ((word, parts),) = document.items()
    if word == "not":
        inner = truth(parts, row)
        return None if inner is None else not inner
    values = [truth(part, row) for part in parts]
    decisive = word == "or"
    if decisive in values:
        return decisive
    return None if None in values else not decisive


@settings(max_examples=150, deadline=None)
@given(
    DOCUMENTS,
    st.lists(
        st.tuples(st.none() | st.integers(-2, 2), st.none() | st.integers(-2, 2)), min_size=1, max_size=6
    ),
)
def test_filter_agrees_with_three_valued_logic(document, values):
    """Any expression over any rows."""
    rows = pa.table(
        {"a": pa.array([a for a, _ in values], pa.int64()), "b": pa.array([b for _, b in values], pa.int64())}
    )
    parsed = parse_filter("read t", document, rows.schema)
    assert set(columns_of(parsed)) <= {"a", "b"}
    assert matches(parsed, rows).to_pylist() == [truth(document, row) is True for row in rows.to_pylist()]
