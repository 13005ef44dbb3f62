"""Changes the number of rollout services of a run that goes on: `python -m relax.run.scale --run RUN_DIR rollout=3`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from relax.control.errors import ControlError
from relax.control.member import ControlMember
from relax.control.scale import OPERATOR, SCALE_KEY, SCALE_PREFIX, WORKERS_KEY
from relax.run.directory import CONTROL_URI
from relax.run.security import DIRECTORY


def main(
    wanted: Annotated[str, typer.Argument(help="rollout=NUMBER")],
    run: Annotated[Path | None, typer.Option(help="directory of the run, on this machine")] = None,
    control: Annotated[str | None, typer.Option(help="URI of its control hub, which it prints")] = None,
    control_keys: Annotated[Path | None, typer.Option(help="its keys, with --control; a directory")] = None,
    deadline_s: Annotated[float, typer.Option(help="longest wait for the run to take it up")] = 10.0,
) -> None:
    """Ask a run for so many rollout services; return once it has taken it up."""
    role, _, number = wanted.partition("=")
    if not role or not number.isdigit():
        raise typer.BadParameter(f"must be rollout=NUMBER, got {wanted!r}", param_hint="wanted")
    try:
        address, keys = _address(run, control), _keys(run, control_keys)
        with ControlMember(address, OPERATOR, os.getpid(), keys=keys) as member:
            before = member.get(WORKERS_KEY)
            member.set(SCALE_PREFIX + role, int(number), deadline_s=deadline_s)
            member.wait_for(lambda: _is_settled(member, int(number)), deadline_s)
            now, asked = member.get(WORKERS_KEY), member.get(SCALE_KEY)
    except ControlError as error:
        typer.echo(f"scale: {error}", err=True)
        raise typer.Exit(1) from error
    if now != int(number):
        reason = "it allows no more" if asked != int(number) else f"it did not answer within {deadline_s:g} s"
        typer.echo(f"scale: the run must take up {wanted}, got {now} service(s); {reason}", err=True)
        raise typer.Exit(1)
    typer.echo(f"rollout services: {before} -> {now}")


def _address(run: Path | None, control: str | None) -> str:
    if (run is None) == (control is None):
        raise typer.BadParameter("give either --run or --control")
    if control is not None:
        return control
    path = Path(run or "") / CONTROL_URI
    if not path.is_file():
        raise typer.BadParameter(
            f"must be the directory of a run that goes on, got no {path}", param_hint="--run"
        )
    return path.read_text().strip()


def _keys(run: Path | None, control_keys: Path | None) -> Path | None:
    """Return the operator's keys, those of the run if it has some."""
    own = None if run is None else run / DIRECTORY / OPERATOR
    return own if own is not None and own.is_dir() else control_keys


def _is_settled(member: ControlMember, number: int) -> bool:
    """Whether the driver has taken the number up, or put its own back."""
    return member.get(WORKERS_KEY) == number or member.get(SCALE_KEY) != number


if __name__ == "__main__":
    typer.run(main)
