"""Entry point of every service: `python -m relax.roles ROLE --run-dir DIR --queue URI --control URI`."""

from __future__ import annotations

import importlib
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import structlog
import typer

from flight.client import QueueClient
from flight.memory import keep_freed_memory
from flight.output import keep_printing
from flight.server.process import LOG_STEPS
from relax.config import load_config
from relax.control.member import ControlMember
from relax.control.timings import ControlTimings
from relax.errors import ConfigError, HopelessError, WiringError
from relax.launch.parent import die_with_parent
from relax.roles.config import SERVABLE
from relax.roles.service import Service
from relax.run.restarts import AGAIN_CODE, VERDICT_CODE

VERDICTS = (ConfigError, WiringError, HopelessError)
"""Errors that a restart would end in again."""
ROLES = ("preprocess", "rollout", "actor", *SERVABLE, "evaluation", "recorder")


def main(
    role: Annotated[str, typer.Argument(help=f"one of {', '.join(ROLES)}")],
    run_dir: Annotated[Path, typer.Option(help="directory of the run, with its config.yaml")],
    model_dir: Annotated[Path, typer.Option(help="checkpoint to start from, Hugging Face format")],
    queue: Annotated[str, typer.Option(help="URI of the TransferQueue")],
    control: Annotated[str, typer.Option(help="URI of the control hub")],
    index: Annotated[int, typer.Option(help="number of this service within its role")] = 0,
    parent_pid: Annotated[int | None, typer.Option(help="end when that process is gone")] = None,
    credentials: Annotated[Path | None, typer.Option(help="what to show to the queue, a directory")] = None,
    control_keys: Annotated[Path | None, typer.Option(help="keys of the control plane, a directory")] = None,
) -> None:
    """Run one service until its phase is drain or stop."""
    if role not in ROLES:
        raise typer.BadParameter(f"role must be one of {', '.join(ROLES)}, got {role!r}")
    keep_freed_memory()
    keep_printing()
    if parent_pid is not None:
        die_with_parent(parent_pid)
    structlog.configure(processors=LOG_STEPS)  # tracebacks without the values of local variables
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the driver, which drains the roles in order
    log = structlog.get_logger(role=role, index=index)
    try:
        with ExitStack() as stack:
            module = importlib.import_module(f"relax.roles.{role}")
            config = load_config([run_dir / "config.yaml"])
            identity, patience_s = f"{role}-{index}", config.restarts.patience_s
            # A driver that is gone takes its services along; one that is merely silent is waited for like the queue.
            silence_s = max(ControlTimings.hub_timeout_s, patience_s)
            timings = ControlTimings(hub_timeout_s=silence_s)
            member = stack.enter_context(
                ControlMember(
                    control,
                    role,
                    index,
                    timings=timings,
                    connect_deadline_s=silence_s,
                    keys=control_keys,
                )
            )
            client = stack.enter_context(
                QueueClient(queue, identity=identity, patience_s=patience_s, credentials=credentials)
            )
            client.void(identity)  # what a process before this one held
            service = Service(
                role=role,
                index=index,
                config=config,
                run_dir=run_dir,
                model_dir=model_dir,
                queue=client,
                control=member,
            )
            service.begin()
            log.info("started", incarnation=service.course.incarnation)
            module.run(service)
            log.info("done")
    except BaseException as error:  # a plug-in's sys.exit() is a failure too
        log.exception("failed")
        print(f"ERROR {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        is_verdict = isinstance(error, VERDICTS) or not isinstance(error, Exception)
        raise SystemExit(VERDICT_CODE if is_verdict else AGAIN_CODE) from error


if __name__ == "__main__":
    typer.run(main)
