"""`resume=runs/<name>`: which run goes on, from where, and what of its configuration may be another. Starts nothing.

A resumed run is the same run: its configuration is the saved one, but for the keys in `CHANGEABLE`, which say how long
it goes on, on how many processes and how it is watched over, not what it trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relax.config import RunConfig, load_config
from relax.errors import ConfigError

RESUME, STEP = "resume=", "resume_step="
CHANGEABLE = (
    "num_steps",
    "progress",
    "actor.layout.",
    "weights.",
    "checkpoint.",
    "restarts.",
    "evaluation.deadline_s",
    "queue.lease_s",
)
"""Keys that may differ in a resumed run; one that ends with a dot stands for all below it."""


@dataclass(frozen=True, kw_only=True)
class ResumeRequest:
    """What the command line says of a run to be resumed; without a step, from its newest checkpoint."""

    run_dir: Path
    step: int | None
    overrides: tuple[str, ...]


def read_words(words: Sequence[str]) -> ResumeRequest | None:
    """Return what is asked for, None if the words are of a new run.

    Raises:
        ConfigError: `resume_step` is no number, or comes without `resume`; or a word may not be changed.
    """
    run_dirs = [word.removeprefix(RESUME) for word in words if word.startswith(RESUME)]
    steps = [word.removeprefix(STEP) for word in words if word.startswith(STEP)]
    if not run_dirs:
        if steps:
            raise ConfigError(
                "resume_step: resume must name the run, got resume_step alone; add resume=runs/<name>"
            )
        return None
    step = steps[-1] if steps else None
    if step is not None and not step.isdecimal():
        raise ConfigError(f"resume_step: must be a number of optimizer steps, got {step!r}")
    others = tuple(word for word in words if not word.startswith((RESUME, STEP)))
    for word in others:
        _check_changeable(word)
    return ResumeRequest(
        run_dir=Path(run_dirs[-1]), step=None if step is None else int(step), overrides=others
    )


def resumed_config(request: ResumeRequest) -> RunConfig:
    """Return the saved configuration with the changes.

    Raises:
        ConfigError: there is no such run, it kept no journal, or a change is impossible.
    """
    path = request.run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(
            f"resume: must be the directory of a run, got {str(request.run_dir)!r} without config.yaml"
        )
    if not (request.run_dir / "journal").is_dir():
        raise ConfigError(
            f"resume: {request.run_dir} must have kept a journal, got none; runs with checkpoint.interval_steps "
            "above 0 or queue.journal=true do"
        )
    saved = load_config([path])
    config = load_config([path], request.overrides)
    if saved.keeps_journal and not config.keeps_journal:
        raise ConfigError(
            "checkpoint.interval_steps: must be above 0 in a resumed run, got 0; its queue is in the journal"
        )
    return config


def _check_changeable(word: str) -> None:
    key = word.partition("=")[0]
    if not any(key == each or (each.endswith(".") and key.startswith(each)) for each in CHANGEABLE):
        names = ", ".join(f"{each}*" if each.endswith(".") else each for each in CHANGEABLE)
        raise ConfigError(
            f"command line: {key!r} must stay as it was in a resumed run; only {names} may be another"
        )
