"""The command that makes the keys of a server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args

import typer

from flight.cli.terminal import Json, exit_codes, print_json
from flight.errors import InvalidRequestError
from flight.security.access import ALL_TABLES, Role

VALID_DAYS = 30.0
USUAL = {
    "admin": "admin",
    "producer": "produce",
    "consumer": "consume",
    "viewer": "read",
    "storage": "store",
}
"""Principals that are made unless others are named, and the role of each on all tables."""


def keys(
    directory: Annotated[Path, typer.Argument(help="Directory to make; it must not be there yet.")],
    *,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address by which clients reach the server; repeat for several."),
    ] = None,
    grant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:TABLE:ROLE",
            help=f"A role of a principal on a table or *; roles are {', '.join(get_args(Role))}. Repeat for more.",
        ),
    ] = None,
    shares_memory: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A principal that may map the server's memory, and so read all."),
    ] = None,
    valid_days: Annotated[float, typer.Option(min=0.001, help="Days until all of them expire.")] = VALID_DAYS,
    as_json: Json = False,
) -> None:
    """Make certificates, tokens and the access file of a server: `serve --keys DIR`, and DIR/NAME for each client.

    Without --grant they are for admin, producer, consumer, viewer and storage (shown by storage servers), each on all
    tables.
    """
    with exit_codes():
        from flight.security.keys import Wanted, make_keys

        granted = _grants(grant or [f"{name}:{ALL_TABLES}:{role}" for name, role in USUAL.items()])
        sharing = shares_memory if shares_memory is not None else [] if grant else ["admin"]
        if unknown := sorted(set(sharing) - set(granted)):
            raise InvalidRequestError(
                f"keys: shares-memory must name principals with a grant, got {', '.join(unknown)}; "
                f"there are {', '.join(granted)}"
            )
        wanted = [
            Wanted(name=name, grants=tables, shares_memory=name in sharing)
            for name, tables in granted.items()
        ]
        try:
            make_keys(directory, wanted, hosts=host or ["127.0.0.1", "localhost"], valid_days=valid_days)
        except OSError as error:
            raise InvalidRequestError(
                f"keys: {directory} must be a new directory, got: {error.strerror}"
            ) from None
    homes = {name: str(directory / name) for name in granted}
    if as_json:
        print_json({"keys": str(directory), "credentials": homes})
        return
    typer.echo(f"serve with: python -m flight serve --keys {directory}")
    for name, home in homes.items():
        typer.echo(f"{name}: --credentials {home}")


def _grants(words: Sequence[str]) -> dict[str, dict[str, list[Role]]]:
    """Return the roles by principal and table."""
    found: dict[str, dict[str, list[Role]]] = {}
    for word in words:
        parts = word.split(":")
        if len(parts) != 3 or not all(parts) or parts[2] not in get_args(Role):
            raise InvalidRequestError(
                f"keys: grant must be NAME:TABLE:ROLE with a role of {', '.join(get_args(Role))}, got {word!r}"
            )
        name, table, role = parts
        found.setdefault(name, {}).setdefault(table, []).append(role)  # type: ignore[arg-type]  # checked above
    return found
