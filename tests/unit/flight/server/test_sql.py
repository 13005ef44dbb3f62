"""Which columns a query needs, and what happens without DuckDB."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flight.broker import Broker, Wait
from flight.errors import InvalidRequestError
from flight.schema import Column, ConsumerSpec, TableSpec
from flight.server import sql
from flight.server.sql_worker import SETTINGS, Refused, needed_columns

TABLES = {"rollouts": ["uid", "reward", "modality", "pixels"], "prompts": ["uid", "text"]}


def needs(query: str) -> dict[str, list[str]]:
    """Return what a query needs."""
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect(":memory:", config=SETTINGS) as connection:
        return needed_columns(connection, query, TABLES)


@pytest.mark.parametrize(
    ("query", "columns"),
    [
        (
            "select modality, avg(reward) as r from rollouts group by 1 order by r",
            {"rollouts": ["reward", "modality"]},
        ),
        ("select count(*) from rollouts", {"rollouts": []}),
        ("select Reward from ROLLOUTS where modality = 'pixels'", {"rollouts": ["reward", "modality"]}),
        (
            "with f as (select uid from prompts) select reward from rollouts join f using (uid)",
            {"prompts": ["uid"], "rollouts": ["uid", "reward"]},
        ),
        ("from prompts", {"prompts": ["uid", "text"]}),
        ("select * exclude (pixels) from rollouts", {"rollouts": TABLES["rollouts"]}),
        ("select r from rollouts r", {"rollouts": TABLES["rollouts"]}),
        ("select count(*) from rollouts natural join prompts", TABLES),
        ("select columns('rew.*') from rollouts", {"rollouts": TABLES["rollouts"]}),
        ("select (select max(reward) from rollouts) as best, 1 as pixel", {"rollouts": ["reward"]}),
    ],
)
def test_query_needs_the_columns_that_it_names(query, columns):
    """Stars and whole rows need all; pixels that nobody names are not copied."""
    assert needs(query) == columns


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("delete from rollouts", "query must be one SELECT"),
        ("select 1; select 2", "query must be one SELECT, got 2 statements"),
        ("select * from nope", "table must be one of ['prompts', 'rollouts'], got 'nope'"),
        ("select * from information_schema.tables", "table must be one of"),
        ("select * from query('select 1')", "table function must be one of"),
        ("select * from arrow_scan(1, 2, 3)", "table function must be one of"),
        ("select 1" + " " * 100_000, "query must be at most 100000 characters"),
    ],
)
def test_query_that_is_no_select_over_the_tables_is_refused(query, message):
    """Before any data are looked at."""
    with pytest.raises(Refused) as caught:
        needs(query)
    assert message in str(caught.value)


def test_without_duckdb_the_error_names_the_extra(monkeypatch, tmp_path):
    """The worker finds none: here because an empty module of that name hides it."""
    (tmp_path / "duckdb.py").write_text("raise ImportError('not installed')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broker = Broker()
    with pytest.raises(InvalidRequestError) as caught:
        sql.SqlEngine(broker).query("select 1", max_rows=1, deadline_s=30.0)
    assert str(caught.value) == (
        "sql: the server must have DuckDB, got none; install the extra beside it: pip install 'relax-omni[sql]'"
    )


def test_query_sees_a_snapshot_of_the_named_columns_only(monkeypatch):
    """The pixels are never read from the table."""
    pytest.importorskip("duckdb")
    broker = Broker()
    columns = (
        Column(name="reward", type=pa.float32(), meaning="reward"),
        Column(name="pixels", type=pa.binary(), meaning="pixels"),
    )
    broker.create_table(
        TableSpec(name="rows", columns=columns, consumers=(ConsumerSpec(name="c", columns=("reward",)),)),
        exist_ok=False,
    )
    rows = {"uid": ["a", "b"], "reward": pa.array([1, 2], pa.float32()), "pixels": [b"x" * 1000] * 2}
    broker.put("rows", pa.record_batch(rows), "", Wait(deadline=0.0))
    asked: list[list[str]] = []
    read = broker.read
    monkeypatch.setattr(
        broker, "read", lambda name, request: asked.append(request.columns) or read(name, request)
    )
    found = sql.SqlEngine(broker).query("select sum(reward) as s from rows", max_rows=1, deadline_s=30.0)
    assert (found.to_pydict(), asked) == ({"s": [3.0]}, [["reward"]])
