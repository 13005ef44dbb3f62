"""Commands about what outlives a server: fsck, snapshot and restore."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from flight.cli.terminal import (
    Credentials,
    Deadline,
    Json,
    connected,
    escape,
    exit_codes,
    format_bytes,
    print_json,
)
from flight.journal.fsck import Report
from flight.journal.fsck import fsck as check_directory
from flight.journal.transfer import restore_directory, snapshot_directory, write_whole

DAMAGED = 1
"""Exit code of `fsck` if a server would not start."""


def fsck(
    directory: Annotated[Path, typer.Argument(help="Directory of a journal that no server uses.")],
    *,
    repair: Annotated[
        bool, typer.Option("--repair", help="Save what can be read; old files are kept in damaged-N/.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check a journal: what is in it, what a crash tore, what is damaged. Exit code 1 if a server would refuse it."""
    with exit_codes():
        report = check_directory(directory, repair=repair)
    if as_json:
        print_json(dataclasses.asdict(report) | {"is_sound": report.is_sound})
    else:
        _print(report)
    if not report.is_sound:
        raise typer.Exit(DAMAGED)


def _print(report: Report) -> None:
    rows = ", ".join(f"{name} {count}" for name, count in report.rows.items()) or "none"
    lines = [
        f"{report.num_files} files, {format_bytes(report.num_bytes)}, {report.last_decision} decisions",
        f"rows by table: {rows}",
        *(f"kept checkpoint {file}: {what}" for file, what in report.kept.items()),
        *(f"torn (a server cuts it by itself): {place}" for place in report.torn),
        *(f"damaged: {place}" for place in report.damaged),
        *(f"{'lost' if report.is_repaired else 'would be lost'}: {what}" for what in report.lost),
    ]
    if report.is_repaired:
        lines.append("repaired: a server can start; the old files are in damaged-N/")
    else:
        lines.append(
            "sound" if report.is_sound else "damaged: copy the directory, then run fsck with --repair"
        )
    typer.echo("\n".join(escape(line) for line in lines))


def snapshot(
    source: Annotated[
        str, typer.Argument(metavar="URI_OR_DIR", help="Address of a server, or a journal that none uses.")
    ],
    file: Annotated[Path, typer.Argument(help="File to write.")],
    *,
    credentials: Credentials = None,
    deadline_s: Deadline = 300.0,
    as_json: Json = False,
) -> None:
    """Write all tables, with rows, leases and counters, into one file. The queue goes on."""
    if "://" in source:
        with connected(source, credentials, deadline_s=deadline_s) as client:
            num_bytes = write_whole(file, client.snapshot(deadline_s=deadline_s))
    else:
        with exit_codes():
            num_bytes = snapshot_directory(Path(source), file)
    if as_json:
        print_json({"file": str(file), "bytes": num_bytes})
    else:
        typer.echo(escape(f"{format_bytes(num_bytes)} written to {file}"))


def restore(
    file: Annotated[Path, typer.Argument(help="A file that `snapshot` wrote.")],
    directory: Annotated[Path, typer.Argument(help="Directory to make; serve it with --journal.")],
    *,
    as_json: Json = False,
) -> None:
    """Make a journal's directory from a snapshot. Leases end when a server starts on it."""
    with exit_codes():
        rows = restore_directory(file, directory)
    if as_json:
        print_json({"directory": str(directory), "rows": rows})
    else:
        told = ", ".join(f"{name} {count}" for name, count in rows.items()) or "none"
        typer.echo(escape(f"rows by table: {told}; run: python -m flight serve --journal {directory}"))
