"""What all commands share: options, the connection, exit codes, tables and JSON on the terminal. No commands."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flight.client import QueueClient
from flight.errors import (
    AccessDeniedError,
    CapacityError,
    DeadlineExceededError,
    FlightQueueError,
    InvalidRequestError,
    SchemaMismatchError,
    TableNotFoundError,
    UnauthenticatedError,
    UnavailableError,
)

DEFAULT_PORT = 8815
LOCAL = f"grpc://127.0.0.1:{DEFAULT_PORT}"
CALL_DEADLINE_S = 10.0
PIPE_COLUMNS = 160
"""Width of tables that do not go to a terminal."""

EXIT_CODES: tuple[tuple[type[FlightQueueError], int], ...] = (
    (InvalidRequestError, 2),
    (UnavailableError, 3),
    (TableNotFoundError, 4),
    (DeadlineExceededError, 5),
    (SchemaMismatchError, 6),
    (CapacityError, 6),
    (UnauthenticatedError, 7),
    (AccessDeniedError, 7),
)
INTERRUPTED = 130


def complete_table(context: typer.Context, incomplete: str) -> list[str]:
    """Return the tables that a half-typed name may mean; nothing if no server answers soon."""
    try:
        with QueueClient(
            address(context.params.get("uri") or LOCAL),
            identity="completion",
            deadline_s=0.5,
            credentials=context.params.get("credentials"),
        ) as client:
            return [name for name in client.list_tables() if name.startswith(incomplete)]
    except FlightQueueError:
        return []


Uri = Annotated[str, typer.Option(help="Address of the server.")]
Credentials = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Directory with the token and certificate to show, made by `keys`."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Name = Annotated[
    str,
    typer.Argument(metavar="TABLE", help="Name of a table; `ls` lists them.", autocompletion=complete_table),
]
Columns = Annotated[str | None, typer.Option(help="Columns, separated by commas; all if left out.")]
Deadline = Annotated[float, typer.Option(min=0, help="Seconds to wait at most.")]


@contextmanager
def connected(
    uri: str, credentials: Path | None = None, *, deadline_s: float = CALL_DEADLINE_S
) -> Iterator[QueueClient]:
    """Connect to a server; what goes wrong inside becomes one line on stderr and an exit code."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # what gRPC has to say of a handshake is in our error
    with (
        exit_codes(),
        QueueClient(
            address(uri), identity=f"cli-{os.getpid()}", deadline_s=deadline_s, credentials=credentials
        ) as client,
    ):
        yield client


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn our errors into one line on stderr and the exit code of their kind, Ctrl-C into 130."""
    try:
        yield
    except FlightQueueError as error:
        typer.echo(f"error: {escape(str(error))}", err=True)
        raise typer.Exit(next((code for kind, code in EXIT_CODES if isinstance(error, kind)), 1)) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def names(columns: str | None) -> list[str] | None:
    """Return the names in a list with commas, None for none."""
    return [name.strip() for name in columns.split(",") if name.strip()] if columns else None


def make_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Return a table for `rich`."""
    table = Table(show_edge=False, pad_edge=False)
    for name in heads:
        table.add_column(escape(name), overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row))
    return table


def make_console() -> Console:
    """Return a console on stdout that is wide enough when nobody looks."""
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, markup=False, highlight=False)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table."""
    make_console().print(make_table(heads, rows))


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a value as JSON: times as text, binary as base64. `indent=None` makes one line of it."""
    typer.echo(json.dumps(value, indent=indent, ensure_ascii=False, default=_to_json))


def escape(text: str) -> str:
    """Keep control characters in data from reaching the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def format_bytes(count: float) -> str:
    """Return a number of bytes for people."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _to_json(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def address(uri: str) -> str:
    """Return an address as a URI; a bare host and port is one of Flight."""
    return uri if "://" in uri else f"grpc://{uri}"
