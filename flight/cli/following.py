"""Commands that go on looking: watch and tail. They consume no row."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Annotated, Any

import pyarrow as pa
import typer
from rich.live import Live
from rich.table import Table

from flight.cli.cells import shorten_rows
from flight.cli.terminal import (
    LOCAL,
    Columns,
    Credentials,
    Json,
    Name,
    Uri,
    complete_table,
    connected,
    escape,
    format_bytes,
    make_console,
    make_table,
    names,
    print_json,
)
from flight.client import QueueClient
from flight.errors import DeadlineExceededError

WATCH_HEADS = (
    *("table", "rows", "bytes", "put/s", "consumer", "ready", "leased", "taken/s", "acked/s"),
    *("version", "max staleness", "outstanding"),
)


def watch(
    tables: Annotated[
        list[str] | None,
        typer.Argument(help="Tables to watch; all if left out.", autocompletion=complete_table),
    ] = None,
    *,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, help="Seconds between refreshes.")
    ] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, help="End after so many refreshes.")] = None,
    uri: Uri = LOCAL,
    credentials: Credentials = None,
    as_json: Json = False,
) -> None:
    """Watch rows, consumers and rates live until Ctrl-C; with --json one line a refresh."""
    with connected(uri, credentials) as client:
        for name in tables or ():
            client.describe(name)
        with closing(client.watch_ticks(interval_s=interval_s, tables=tables or None)) as ticks:
            shown = islice(ticks, count)
            if as_json:
                for tick in shown:
                    print_json(tick, indent=None)
            elif sys.stdout.isatty():
                with Live(console=make_console(), auto_refresh=False) as live:
                    for tick in shown:
                        live.update(_view(tick), refresh=True)
            else:
                for tick in shown:
                    make_console().print(_view(tick))


def _view(tick: list[dict[str, Any]]) -> Table:
    return make_table(WATCH_HEADS, [line for each in tick for line in _watch_lines(each)])


def _watch_lines(each: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield one line a consumer; what belongs to the table stands on its first line."""
    facts = [each["table"], each["rows"], format_bytes(each["bytes"]), _rate(each["put_per_s"])]
    bound = [
        "" if each[key] is None else each[key] for key in ("policy_version", "max_staleness", "outstanding")
    ]
    for consumer in each["consumers"] or [{}]:
        counts = [consumer.get(key) for key in ("name", "ready", "leased")]
        rates = [_rate(consumer.get(key)) for key in ("taken_per_s", "acked_per_s")]
        yield [*facts, *("" if count is None else count for count in counts), *rates, *bound]
        facts, bound = [""] * len(facts), [""] * len(bound)


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def tail(
    table: Name,
    *,
    num_rows: Annotated[int, typer.Option("-n", "--rows", min=0, help="Rows of now to begin with.")] = 5,
    count: Annotated[int | None, typer.Option(min=1, help="End after so many rows.")] = None,
    columns: Columns = None,
    interval_s: Annotated[float, typer.Option("--interval", min=0.05, help="Seconds between looks.")] = 0.5,
    deadline_s: Annotated[float | None, typer.Option(min=0, help="Give up after so many seconds.")] = None,
    uri: Uri = LOCAL,
    credentials: Credentials = None,
    as_json: Json = False,
) -> None:
    """Print new rows as they come, one a line, until the table is sealed; long values are shortened.

    Columns that another writer adds later may still be empty. A row that all consumers finish between two looks is
    not seen.
    """
    with connected(uri, credentials) as client:
        num_seen = 0
        for rows in _new_rows(client, table, names(columns), num_rows, interval_s, deadline_s):
            for row in shorten_rows(rows if count is None else rows.slice(0, count - num_seen)):
                num_seen += 1
                if as_json:
                    print_json(row, indent=None)
                else:
                    typer.echo(
                        "  ".join(f"{name}={escape(str(v))}" for name, v in row.items() if v is not None)
                    )
            sys.stdout.flush()
            if num_seen == count:
                return


def _new_rows(
    client: QueueClient,
    table: str,
    columns: list[str] | None,
    num_rows: int,
    interval_s: float,
    deadline_s: float | None,
) -> Iterator[pa.Table]:
    """Yield the last `num_rows` rows, then what comes after them, until the end of the table."""
    end = None if deadline_s is None else time.monotonic() + deadline_s
    last = client.read(table, columns=[], max_rows=1, newest=True)
    next_id = last["row_id"][0].as_py() + 1 if last.num_rows else 0
    if num_rows:
        yield client.read(table, columns=columns, row_ids=(None, next_id - 1), max_rows=num_rows, newest=True)
    while True:
        # Asked before the rows are: what comes in between belongs to the next round.
        is_sealed = client.stats(table)["sealed"]
        rows = client.read(table, columns=columns, row_ids=(next_id, None))
        if rows.num_rows:
            next_id = rows["row_id"][rows.num_rows - 1].as_py() + 1
            yield rows
        elif is_sealed:
            return
        if end is not None and time.monotonic() >= end:
            raise DeadlineExceededError(
                f"tail {table}: rows must come within {deadline_s} s, got the last one before row_id {next_id}"
            )
        time.sleep(interval_s)
