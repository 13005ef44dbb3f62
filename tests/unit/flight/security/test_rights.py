"""What requests need."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flight import messages as m
from flight.schema import Column, ConsumerSpec, TableSpec, TicketSpec
from flight.security.rights import tables_of, tables_referred_to


@pytest.mark.parametrize(
    ("name", "request_", "tables"),
    [
        ("describe", m.TableRequest(table="a"), ["a"]),
        ("stats", m.StatsRequest(table="a"), ["a"]),
        ("stats", m.StatsRequest(), []),
        ("WatchTicket", m.WatchTicket(), []),
        ("WatchTicket", m.WatchTicket(tables=["a", "b"]), ["a", "b"]),
        ("ping", m.Request(), []),
        ("storage_join", m.Request(), ["*"]),
        ("a word of the future", m.Request(), ["*"]),
    ],
)
def test_tables_of_a_request(name, request_, tables):
    """Those that it names; all, if it names none and does not show each caller only what is theirs."""
    assert tables_of(name, request_) == tables


def test_new_table_refers_to_others_by_columns_and_tickets():
    """Who may not see those may not make it."""
    columns = (Column(name="media", type=pa.string(), meaning="an id", references="media"),)
    spec = TableSpec(
        name="prompts",
        columns=columns,
        consumers=(ConsumerSpec(name="c", columns=("media",)),),
        tickets=TicketSpec(table="rollouts", rows_per_ticket=1),
    )
    assert tables_referred_to(m.from_spec(spec)) == ["media", "rollouts"]
    schema = pa.schema([column.to_field() for column in columns]).serialize().to_pybytes()
    assert tables_referred_to(m.AlterTable(table="prompts", arrow_schema=schema)) == ["media"]
    assert tables_referred_to(m.TableRequest(table="prompts")) == []
