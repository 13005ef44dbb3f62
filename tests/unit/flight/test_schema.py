"""Specifications that could never work are refused when they are made."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flight.errors import InvalidRequestError
from flight.schema import Column, ConsumerSpec, StalenessSpec, TableSpec, TicketSpec
from tests.kit.queues import prompts_spec, rollouts_spec

X = Column(name="x", type=pa.int64(), meaning="a number", unit="1", shape="[]", writer="w")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "my table"}, "name must be a plain identifier, got 'my table'"),
        ({"group_size": 0}, "group_size must be at least 1, got 0"),
        ({"columns": (X, X)}, "columns must be named once each, got ['x', 'x']"),
        (
            {"columns": (Column(name="uid", type=pa.string(), meaning="u"),)},
            "columns must be none of ('row_id', 'uid', 'group_id', 'attempt'), got ['uid']",
        ),
        (
            {
                "columns": (
                    Column(name="x", type=pa.list_(pa.dictionary(pa.int32(), pa.string())), meaning="d"),
                )
            },
            "column 'x' must be of a plain (not dictionary) type, got "
            "ListType(list<item: dictionary<values=string, indices=int32, ordered=0>>)",
        ),
        (
            {"consumers": (ConsumerSpec(name="c", columns=("y",)),)},
            "consumer 'c' must be made of columns ['x'], got ['y']",
        ),
        (
            {"consumers": (ConsumerSpec(name="c", columns=(), sampler="random"),)},
            "sampler must be one of ('fifo', 'groups', 'keyed'), got 'random'",
        ),
        ({"tickets": TicketSpec(table="t", rows_per_ticket=0)}, "rows_per_ticket must be at least 1, got 0"),
        (
            {"tickets": TicketSpec(table="t", rows_per_ticket=1, consumer="k")},
            "tickets.consumer must be one of ['c'], got 'k'",
        ),
        (
            {"staleness": StalenessSpec(max_staleness=0, rows_per_version=1, consumer="k")},
            "staleness.consumer must be one of the taking consumers ['c'], got 'k'",
        ),
        (
            {"staleness": StalenessSpec(max_staleness=-1, rows_per_version=1, consumer="c")},
            "max_staleness must be 0 or more policy versions, got -1",
        ),
        (
            {"staleness": StalenessSpec(max_staleness=0, rows_per_version=1, consumer="c")},
            "columns must be with policy_version_start of type int64, got None",
        ),
    ],
)
def test_table_that_could_not_work_is_refused(changes, message):
    """The rule and the value are named."""
    values = {
        "name": "t",
        "columns": (X,),
        "consumers": (
            ConsumerSpec(name="c", columns=("x",)),
            ConsumerSpec(name="k", columns=("x",), sampler="keyed"),
        ),
    }
    with pytest.raises(InvalidRequestError) as caught:
        TableSpec(**values | changes)
    assert str(caught.value).partition(": ")[2] == message


def test_column_survives_its_arrow_field():
    """Meaning, unit, shape, writer and nullability travel as field metadata."""
    assert Column.from_field(X.to_field()) == X
    assert Column.from_field(pa.field("y", pa.int8())).nullable


def test_arrow_schema_starts_with_the_keys():
    """Key columns first, then the table's own."""
    assert rollouts_spec().arrow_schema().names[:4] == ["row_id", "uid", "group_id", "policy_version_start"]


def test_ticket_consumer_is_the_first_unless_named():
    """Only one consumer's takes are permits."""
    assert prompts_spec().ticket_consumer() == "rollout"
    assert prompts_spec().queue_consumers() == ["rollout"]
    assert rollouts_spec().ticket_consumer() == ""


def test_checked_columns_names_the_unknown():
    """Key columns are always there and need not be asked for."""
    spec = prompts_spec()
    assert spec.checked_columns(["uid", "text", "text"]) == ["text"]
    with pytest.raises(InvalidRequestError) as caught:
        spec.checked_columns(["words"])
    assert str(caught.value) == "table 'prompts': columns must be among ['text'], got ['words']"
