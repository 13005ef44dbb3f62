"""Commands that change tables: create, put, seal, drain, requeue, set-max-staleness, truncate,
drop. Each says what it did."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from flight.cli.terminal import (
    LOCAL,
    Credentials,
    Deadline,
    Json,
    Name,
    Uri,
    connected,
    exit_codes,
    names,
    print_json,
)
from flight.errors import DeadlineExceededError, FlightQueueError, InvalidRequestError
from flight.files.file_rows import FileRows
from flight.files.table_config import load_tables

LOOK_S = 0.2
"""How often drain looks whether the consumers have finished."""


def create(
    config: Annotated[Path, typer.Option(help="YAML file that declares tables; see conf/tables.yaml.")],
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the file only; needs no server.")] = False,
    uri: Uri = LOCAL,
    credentials: Credentials = None,
    as_json: Json = False,
) -> None:
    """Create the tables that a YAML file declares; those that are there already must be the same."""
    if dry_run:
        with exit_codes():
            specs = load_tables(config)
    else:
        with connected(uri, credentials) as client:
            specs = load_tables(config, known_tables=client.list_tables())
            for spec in specs:
                client.create_table(spec)
    done = [spec.name for spec in specs]
    _say({"tables": done}, f"{'valid' if dry_run else 'there now'}: {', '.join(done)}", as_json=as_json)


def put(
    table: Name,
    file: Annotated[
        Path, typer.Argument(help="A .jsonl, .parquet or .arrow file; - for JSON lines on stdin.")
    ],
    *,
    writer: Annotated[str, typer.Option(help="Put only this writer's columns.")] = "",
    uid_prefix: Annotated[
        str | None,
        typer.Option(help="Rows without uid get this, a colon and their line; the file's name if left out."),
    ] = None,
    round_floats: Annotated[
        bool, typer.Option("--round-floats", help="Let wide floats of a typed file lose digits.")
    ] = False,
    deadline_s: Deadline = 30.0,
    uri: Uri = LOCAL,
    credentials: Credentials = None,
    as_json: Json = False,
) -> None:
    """Put the rows of a file; nothing is put unless the whole file fits. Repeating it is harmless.

    Types become the table's where nothing is lost. In JSON lines, binary is base64 and times are ISO 8601. row_id and
    attempt of an exported file are left out.
    """
    num_rows = num_duplicates = 0
    with connected(uri, credentials) as client, _as_file(file) as path:
        is_stdin = path != file
        rows = FileRows(
            path=path,
            name="stdin" if is_stdin else str(file),
            spec=client.describe(table),
            uid_prefix=uid_prefix if is_stdin or uid_prefix else file.name,
            writer=writer,
            round_floats=round_floats,
        )
        total = sum(batch.num_rows for batch in rows.batches())
        try:
            for batch in rows.batches():
                result = client.put(table, batch, writer=writer, deadline_s=deadline_s)
                num_rows += result.num_rows
                num_duplicates += result.num_duplicates
        except FlightQueueError:
            if num_rows:
                typer.echo(
                    f"note: {num_rows} of {total} rows are in; putting the file again adds the rest", err=True
                )
            raise
    _say(
        {"table": table, "rows": num_rows, "duplicates": num_duplicates},
        f"{num_rows} rows put into {table}"
        + (f", {num_duplicates} were there already" if num_duplicates else ""),
        as_json=as_json,
    )


@contextmanager
def _as_file(file: Path) -> Iterator[Path]:
    """Yield a file to be read twice: the given one, or a copy of standard input."""
    if str(file) != "-":
        yield file
        return
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        yield Path(copy.name)


def seal(
    table: Name,
    *,
    expected_rows: Annotated[
        int | None,
        typer.Option(min=0, help="Rows in all after which none comes; none from now on if left out."),
    ] = None,
    uri: Uri = LOCAL,
    credentials: Credentials = None,
    as_json: Json = False,
) -> None:
    """Declare the end of a table: consumers learn it once they have taken what is there."""
    with connected(uri, credentials) as client:
        client.seal(table, expected_rows)
    _say({"table": table, "expected_rows": expected_rows}, f"{table} is sealed", as_json=as_json)


def drain(
    table: Name,
    *,
    deadline_s: Deadline = 300.0,
    uri: Uri = LOCAL,
    credentials: Credentials = None,
    as_json: Json = False,
) -> None:
    """Seal a table and wait until its consumers have finished every row; exit code 5 if they do not in time."""
    with connected(uri, credentials) as client:
        client.seal(table)
        end = time.monotonic() + deadline_s
        while (left := _unfinished(client.stats(table))) and time.monotonic() < end:
            time.sleep(LOOK_S)
        if left:
            behind = ", ".join(f"{consumer} with {num_rows}" for consumer, num_rows in left.items())
            raise DeadlineExceededError(
                f"drain {table}: rows must be finished within {deadline_s:g} s, got consumers behind: {behind}; "
                "the table stays sealed, drain it again to wait on"
            )
        acked = {name: each["acked"] for name, each in client.stats(table)["consumers"].items()}
    _say({"table": table, "acked": acked}, f"{table} is drained", as_json=as_json)


def _unfinished(stats: dict[str, Any]) -> dict[str, int]:
    """Return how many rows each consumer has still to finish, of those that have any."""
    left = {
        name: each["ready"] + each["leased"] + each["unready"]
        for name, each in stats["consumers"].items()
        if "ready" in each
    }
    if not any(left.values()):
        # A keyed consumer has no queue; what the others are done with is there for its sake only.
        left |= {name: stats["rows"] for name, each in stats["consumers"].items() if "ready" not in each}
    return {name: num_rows for name, num_rows in left.items() if num_rows}


def requeue(
    table: Name,
    consumer: Annotated[str, typer.Argument(help="Whose dead letters come again.")],
    *,
    uids: Annotated[str | None, typer.Option(help="Uids, separated by commas; all if left out.")] = None,
    uri: Uri = LOCAL,
    credentials: Credentials = None,
    as_json: Json = False,
) -> None:
    """Make dead letters ready again: rows that a consumer was given too often without finishing them."""
    with connected(uri, credentials) as client:
        num_rows = client.requeue(table, consumer, names(uids))
    facts = {"table": table, "consumer": consumer, "rows": num_rows}
    _say(facts, f"{num_rows} rows of {table} are ready again for {consumer}", as_json=as_json)


def set_max_staleness(
    table: Name,
    max_staleness: Annotated[int, typer.Argument(min=0, help="Policy versions; 0 is on-policy.")],
    *,
    uri: Uri = LOCAL,
    credentials: Credentials = None,
    as_json: Json = False,
) -> None:
    """Change the staleness bound of a table while it is in use."""
    with connected(uri, credentials) as client:
        client.set_max_staleness(table, max_staleness)
        bound = client.stats(table)["staleness"]
    facts = {key: bound[key] for key in ("max_staleness", "bound_rows", "outstanding")}
    _say(
        {"table": table} | facts,
        f"{table}: max_staleness {bound['max_staleness']} policy versions, "
        f"{bound['outstanding']} of at most {bound['bound_rows']} rows outstanding",
        as_json=as_json,
    )


Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def truncate(
    table: Name, *, yes: Yes = False, uri: Uri = LOCAL, credentials: Credentials = None, as_json: Json = False
) -> None:
    """Remove all rows of a table; it may be filled anew."""
    with connected(uri, credentials) as client:
        _confirm("truncate", table, client.stats(table)["rows"], yes)
        num_rows = client.truncate_table(table)
    _say({"table": table, "rows": num_rows}, f"{num_rows} rows of {table} are removed", as_json=as_json)


def drop(
    table: Name, *, yes: Yes = False, uri: Uri = LOCAL, credentials: Credentials = None, as_json: Json = False
) -> None:
    """Remove a table and its rows; calls that wait on it end with an error."""
    with connected(uri, credentials) as client:
        num_rows = client.stats(table)["rows"]
        _confirm("drop", table, num_rows, yes)
        client.drop_table(table)
    _say({"table": table, "rows": num_rows}, f"{table} is removed, with {num_rows} rows", as_json=as_json)


def _confirm(verb: str, table: str, num_rows: int, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidRequestError(
            f"{verb} {table}: it must be confirmed, got no terminal to ask on; give --yes"
        )
    typer.confirm(f"{verb} {table}, which has {num_rows} rows?", abort=True)


def _say(facts: dict[str, Any], text: str, *, as_json: bool) -> None:
    if as_json:
        print_json(facts)
    else:
        typer.echo(text)
