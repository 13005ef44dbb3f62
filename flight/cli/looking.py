"""Commands that look at tables once: ls, schema, head, stats, sql, export. They consume no row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from flight.cli.cells import shorten_rows
from flight.cli.terminal import (
    LOCAL,
    Columns,
    Credentials,
    Deadline,
    Json,
    Name,
    Uri,
    complete_table,
    connected,
    format_bytes,
    names,
    print_json,
    print_table,
)
from flight.files.file_rows import check_suffix, write_table

Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the answer to this .parquet or .arrow file.")
]


def list_tables(uri: Uri = LOCAL, credentials: Credentials = None, as_json: Json = False) -> None:
    """List the tables with their rows, bytes and waiting consumers."""
    with connected(uri, credentials) as client:
        stats = client.stats()
    if as_json:
        print_json(stats)
        return
    if not stats:
        typer.echo(f"no tables at {uri}")
        return
    print_table(
        ["table", "rows", "bytes", "put", "retired", "ready for", "version", "sealed"],
        [
            (
                name,
                each["rows"],
                format_bytes(each["bytes"]),
                each["put"],
                each["retired"],
                ", ".join(f"{who} {c['ready']}" for who, c in each["consumers"].items() if "ready" in c),
                each["staleness"]["policy_version"] if each["staleness"] else "",
                "yes" if each["sealed"] else "no",
            )
            for name, each in stats.items()
        ],
    )


def schema(table: Name, uri: Uri = LOCAL, credentials: Credentials = None, as_json: Json = False) -> None:
    """Show the columns of a table with type, unit, shape, writer and meaning."""
    with connected(uri, credentials) as client:
        spec = client.describe(table)
    rows = [
        (c.name, str(c.type), c.unit, c.shape, c.writer, "yes" if c.nullable else "no", c.meaning)
        for c in spec.columns
    ]
    heads = ["column", "type", "unit", "shape", "writer", "nullable", "meaning"]
    if as_json:
        print_json([dict(zip(heads, row, strict=True)) for row in rows])
        return
    print_table(heads, rows)
    for consumer in spec.consumers:
        typer.echo(
            f"consumer {consumer.name} ({consumer.sampler}) needs {', '.join(consumer.columns) or 'no column'}"
        )


def head(
    table: Name,
    *,
    num_rows: Annotated[int, typer.Option("-n", "--rows", min=1, help="Rows to show.")] = 5,
    newest: Annotated[bool, typer.Option(help="Show the last rows instead of the first.")] = False,
    columns: Columns = None,
    dead: Annotated[
        bool, typer.Option("--dead", help="Only dead letters, with consumer, attempts and reason.")
    ] = False,
    uri: Uri = LOCAL,
    credentials: Credentials = None,
    as_json: Json = False,
) -> None:
    """Show a few rows; long values are shortened."""
    with connected(uri, credentials) as client:
        found = client.read(
            table,
            columns=names(columns),
            max_rows=num_rows,
            newest=newest,
            state="dead" if dead else None,
        )
    rows = shorten_rows(found)
    if as_json:
        print_json(rows)
        return
    for row in rows:
        print_table(
            ["column", "value"], [(name, "" if value is None else value) for name, value in row.items()]
        )
    if not rows:
        typer.echo(f"table {table} has no {'dead letters' if dead else 'rows'} now")


def stats(
    table: Annotated[
        str | None,
        typer.Argument(help="Name of a table; all if left out.", autocompletion=complete_table),
    ] = None,
    uri: Uri = LOCAL,
    credentials: Credentials = None,
    as_json: Json = False,
) -> None:
    """Show counts, consumers, leases and the staleness bound."""
    with connected(uri, credentials) as client:
        found = client.stats() if table is None else {table: client.stats(table)}
        owners = client.storage_servers() if table is None else []
    if as_json:
        print_json(found | ({"@storage": owners} if owners else {}))
        return
    for name, each in found.items():
        print_table([name, ""], list(_flatten(each)))
    if owners:
        heads = ["storage server", "state", "rows", "bytes", "capacity", "silent s"]
        print_table(heads, [_owner_cells(each) for each in owners])


def sql(
    query: Annotated[str, typer.Argument(help="A SELECT over the tables by their names.")],
    *,
    output: Output = None,
    deadline_s: Deadline = 30.0,
    uri: Uri = LOCAL,
    credentials: Credentials = None,
    as_json: Json = False,
) -> None:
    """Ask the live tables in SQL (DuckDB); the rows stay where they are."""
    with connected(uri, credentials, deadline_s=deadline_s) as client:
        if output is not None:
            check_suffix(output)
        answer = client.sql(query)
        if output is not None:
            write_table(answer, output)
    if output is not None:
        _print_written(answer.num_rows, output, as_json=as_json)
    elif as_json:
        print_json(answer.to_pylist())
    else:
        rows = shorten_rows(answer)
        print_table(answer.column_names, [["" if v is None else v for v in row.values()] for row in rows])


def export(
    table: Name,
    file: Annotated[
        Path, typer.Argument(help="A .parquet, or an .arrow, .feather or .ipc file; replaced whole.")
    ],
    *,
    columns: Columns = None,
    uri: Uri = LOCAL,
    credentials: Credentials = None,
    as_json: Json = False,
) -> None:
    """Write the rows of a table to a Parquet or Arrow file that pandas and polars read."""
    with connected(uri, credentials, deadline_s=600.0) as client:
        check_suffix(file)
        rows = client.read(table, columns=names(columns))
        write_table(rows, file)
    _print_written(rows.num_rows, file, as_json=as_json)


def _owner_cells(owner: dict[str, Any]) -> tuple[Any, ...]:
    capacity = "" if owner["capacity_bytes"] is None else format_bytes(owner["capacity_bytes"])
    used = format_bytes(owner["used_bytes"])
    return owner["location"], owner["state"], owner["num_rows"], used, capacity, owner["silent_s"]


def _print_written(num_rows: int, file: Path, *, as_json: bool) -> None:
    num_bytes = file.stat().st_size
    if as_json:
        print_json({"file": str(file), "rows": num_rows, "bytes": num_bytes})
    else:
        typer.echo(f"{num_rows} rows in {file}, {format_bytes(num_bytes)}")


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        elif value not in ({}, [], None):
            yield f"{prefix}{key}", value
