"""Where a run keeps its things: it creates and names directories, and after a run that was broken off it puts them
in order. What the files hold is others' business.

runs/<name>/config.yaml      the configuration as it ran
runs/<name>/logs/            one file a service
runs/<name>/security/        keys, of a run with security=on; for its user alone
runs/<name>/weights/         the last published snapshots; a link into shared memory with weights.where=shm
runs/<name>/rollouts/        recorded rollouts, Parquet, one file a policy version
runs/<name>/checkpoint/      huggingface/ and megatron/<step>/
runs/<name>/row_errors.parquet  rows that were refused, when there were any
runs/<name>/journal/         the queue's journal, of a run that keeps one
runs/<name>/history.jsonl    starts, restarts, returns to checkpoints
runs/<name>/metrics.parquet  every metric; TensorBoard events lie in tensorboard/
runs/<name>/report.html      the run on one page
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from relax.errors import ConfigError
from relax.observe.recorder import RolloutRecorder

DEFAULT_NAME = "omni_grpo"
CONTROL_URI = "control.uri"
"""File with the address of the control hub, while a run goes on."""
HALF_WRITTEN = (".*.partial", ".*.replaced", ".*.unfinished", "queue.uri", "queue.uri.tmp", CONTROL_URI)
"""What a killed service may leave behind, for `Path.rglob`; whole files never have such names."""


def make_run_dir(run_root: Path, name: str | None, *, overwrite: bool) -> Path:
    """Create the directory of a run and return it.

    A run without a name is called `omni_grpo`, numbered when that is taken.

    Raises:
        ConfigError: the named directory exists already and `overwrite` is off, or it is no run's directory.
    """
    if name is None:
        return _first_free(run_root)
    run_dir = run_root / name
    if run_dir.exists():
        if not overwrite:
            raise ConfigError(
                f"name: {run_dir} must be new, got a directory that exists; choose another name or overwrite=true"
            )
        if any(run_dir.iterdir()) and not (run_dir / "config.yaml").is_file():
            raise ConfigError(
                f"name: {run_dir} must be a run's directory to be replaced, got one without config.yaml"
            )
        shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True)
    return run_dir


def release_run_dir(run_dir: Path) -> None:
    """Give up the directory of a run that did not start, so that its name is free again; one in use stays."""
    with suppress(OSError):
        run_dir.rmdir()


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Have a run's directory for this process alone, until the block or the process ends.

    Raises:
        ConfigError: another process has it: the run is going on.
    """
    with (run_dir / "config.yaml").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run: {run_dir} must be nobody else's, got a run that is going on; stop it first"
            ) from None
        yield


def complete_records(run_dir: Path) -> None:
    """Once no service is left: make files of the rollouts that a killed recorder had received, and remove what any
    service left half-written. Changes nothing after a run that ended well.
    """
    for pattern in HALF_WRITTEN:
        for left in list(run_dir.rglob(pattern)):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
    RolloutRecorder(run_dir / "rollouts").close()


def _first_free(run_root: Path) -> Path:
    run_root.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        run_dir = run_root / (DEFAULT_NAME if number == 1 else f"{DEFAULT_NAME}-{number}")
        try:
            run_dir.mkdir()
        except FileExistsError:
            number += 1
        else:
            return run_dir


@contextmanager
def said(path: Path, text: str) -> Iterator[None]:
    """Have a file with this text while the block runs."""
    path.write_text(text)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
