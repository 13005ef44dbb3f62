"""The command line: run a queue server, or look into one while a job uses it. Looking never consumes a row.

Exit codes: 0 well, 1 another failure, 2 wrong usage or request, 3 no server at the address, 4 no such table.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flight.cells import shorten_rows
from flight.client import QueueClient
from flight.errors import FlightQueueError, InvalidRequestError, TableNotFoundError, UnavailableError
from flight.process import serve as serve_until_stopped

app = typer.Typer(
    name="flight",
    help="TransferQueue: typed tables on an Arrow Flight server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

DEFAULT_PORT = 8815
EXIT_CODES: tuple[tuple[type[FlightQueueError], int], ...] = (
    (InvalidRequestError, 2),
    (UnavailableError, 3),
    (TableNotFoundError, 4),
)

Uri = Annotated[str, typer.Option(help="Address of the server.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Name = Annotated[str, typer.Argument(metavar="TABLE", help="Name of a table; `ls` lists them.")]
LOCAL = f"grpc://127.0.0.1:{DEFAULT_PORT}"


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = DEFAULT_PORT,
    uri_file: Annotated[
        Path | None, typer.Option(help="Write the address to this file once it answers.")
    ] = None,
    parent_pid: Annotated[int | None, typer.Option(help="Exit when this process is gone.")] = None,
) -> None:
    """Run a server; its first line of output is its address."""
    with _exit_codes():
        code = serve_until_stopped(host, port, uri_file=uri_file, parent_pid=parent_pid)
        # Open calls keep gRPC threads alive, and an orderly interpreter exit would wait for them.
        os._exit(code)


@app.command("ls")
def list_tables(uri: Uri = LOCAL, as_json: Json = False) -> None:
    """List the tables with their rows, bytes and waiting consumers."""
    with _connected(uri) as client:
        stats = client.stats()
    if as_json:
        _print_json(stats)
        return
    if not stats:
        typer.echo(f"no tables at {uri}")
        return
    _print_table(
        ["table", "rows", "bytes", "put", "retired", "ready for", "version", "sealed"],
        [
            (
                name,
                each["rows"],
                _bytes(each["bytes"]),
                each["put"],
                each["retired"],
                ", ".join(f"{who} {c['ready']}" for who, c in each["consumers"].items() if "ready" in c),
                each["staleness"]["policy_version"] if each["staleness"] else "",
                "yes" if each["sealed"] else "no",
            )
            for name, each in stats.items()
        ],
    )


@app.command()
def schema(table: Name, uri: Uri = LOCAL, as_json: Json = False) -> None:
    """Show the columns of a table with type, unit, shape, writer and meaning."""
    with _connected(uri) as client:
        spec = client.describe(table)
    rows = [
        (c.name, str(c.type), c.unit, c.shape, c.writer, "yes" if c.nullable else "no", c.meaning)
        for c in spec.columns
    ]
    heads = ["column", "type", "unit", "shape", "writer", "nullable", "meaning"]
    if as_json:
        _print_json([dict(zip(heads, row, strict=True)) for row in rows])
        return
    _print_table(heads, rows)
    for consumer in spec.consumers:
        typer.echo(
            f"consumer {consumer.name} ({consumer.sampler}) needs {', '.join(consumer.columns) or 'no column'}"
        )


@app.command()
def head(
    table: Name,
    num_rows: Annotated[int, typer.Option("-n", "--rows", min=1, help="Rows to show.")] = 5,
    newest: Annotated[bool, typer.Option(help="Show the last rows instead of the first.")] = False,
    columns: Annotated[
        str | None, typer.Option(help="Columns, separated by commas; all if left out.")
    ] = None,
    uri: Uri = LOCAL,
    as_json: Json = False,
) -> None:
    """Show a few rows; long values are shortened."""
    chosen = columns.split(",") if columns else None
    with _connected(uri) as client:
        rows = shorten_rows(client.read(table, columns=chosen, max_rows=num_rows, newest=newest))
    if as_json:
        _print_json(rows)
        return
    for row in rows:
        _print_table(
            ["column", "value"], [(name, "" if value is None else value) for name, value in row.items()]
        )
    if not rows:
        typer.echo(f"table {table} has no rows now")


@app.command()
def stats(
    table: Annotated[str | None, typer.Argument(help="Name of a table; all if left out.")] = None,
    uri: Uri = LOCAL,
    as_json: Json = False,
) -> None:
    """Show counts, consumers, leases and the staleness bound."""
    with _connected(uri) as client:
        found = client.stats() if table is None else {table: client.stats(table)}
    if as_json:
        _print_json(found)
        return
    for name, each in found.items():
        _print_table([name, ""], [(key, value) for key, value in _flatten(each)])


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        elif value not in ({}, [], None):
            yield f"{prefix}{key}", value


def _print_table(heads: list[str], rows: list[tuple[Any, ...]]) -> None:
    table = Table(show_edge=False, pad_edge=False)
    for name in heads:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(_escape(str(value)) for value in row))
    width = None if sys.stdout.isatty() else 160
    Console(width=width, markup=False, highlight=False).print(table)


def _escape(text: str) -> str:
    """Keep control characters in data from reaching the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


@contextmanager
def _connected(uri: str) -> Iterator[QueueClient]:
    address = uri if "://" in uri else f"grpc://{uri}"
    with _exit_codes(), QueueClient(address, identity=f"cli-{os.getpid()}", deadline_s=10.0) as client:
        yield client


@contextmanager
def _exit_codes() -> Iterator[None]:
    try:
        yield
    except FlightQueueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(next((code for kind, code in EXIT_CODES if isinstance(error, kind)), 1)) from None


main: Callable[[], Any] = app
"""Entry point of the console script."""
