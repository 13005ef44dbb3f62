"""Make the tiny thinker that a run without `model.path` starts from:

    python pipelines/tiny_omni.py --out data/tiny_omni-0 --seed 0 --manifest data/toy_omni/train.jsonl

Random weights, then a warm-up on the answer format alone (`relax.models.warm_up`). Of the manifest only the wording
of the questions and the sets of their answers are used, never media nor which answer is right. A directory that was
made from the same seed and questions is left alone; a new one appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that the program runs from a clone that is not installed

from relax.data.config import SourceConfig, read_sources  # noqa: E402  (after the path)
from relax.data.manifest import Manifest, Record  # noqa: E402
from relax.errors import ConfigError, RelaxError, WiringError  # noqa: E402

if TYPE_CHECKING:
    from relax.models.warm_up import Question, WarmUpConfig

VERSION = 2
"""Raised when the same seed and questions would give another model."""
STAMP = "tiny_omni.json"


def main(
    out: Annotated[Path, typer.Option(help="directory to make")],
    source: Annotated[
        list[str],
        typer.Option(help="path with questions that the model learns to answer, or a source's keys as JSON"),
    ],
    seed: Annotated[int, typer.Option(help="decides weights and warm-up")] = 0,
) -> None:
    """Make a tiny Qwen3-Omni-MoE thinker that answers in the right form, at chance."""
    try:
        typer.echo(make(out, _sources(source), seed))
    except (OSError, RelaxError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _sources(words: list[str]) -> list[SourceConfig]:
    try:
        given = {
            f"source{at}": json.loads(word) if word.startswith("{") else word for at, word in enumerate(words)
        }
    except ValueError as error:
        raise ConfigError(f"--source: must be a path or JSON, got: {error}") from error
    return list(read_sources("--source", given, {}).values())


def make(out: Path, sources: Sequence[SourceConfig], seed: int, warm_up: WarmUpConfig | None = None) -> str:
    """Make the model unless `out` has it, and return one line about it.

    Raises:
        WiringError: `out` holds something that this program has not made.
        RelaxError: a source is missing, or they have no usable question.
    """
    from relax.models.warm_up import questions_of

    rows = (row for source in sources for row in Manifest(source))
    questions = questions_of(row for row in rows if isinstance(row, Record))
    return make_from(out, questions, seed, warm_up)


def make_from(out: Path, questions: list[Question], seed: int, warm_up: WarmUpConfig | None = None) -> str:
    """Make the model that answers these questions unless `out` has it, and return one line about it.

    Raises:
        WiringError: `out` holds something that this program has not made.
        RelaxError: there is no usable question.
    """
    started = time.monotonic()
    import torch

    from relax.models.warm_up import WarmUpConfig

    torch.set_num_threads(1)  # the tensors are too small to share
    steps = warm_up or WarmUpConfig()
    stamp = _stamp(seed, questions, steps)
    found = _read_stamp(out)
    if found == stamp:
        return f"tiny model: {out} is there already"
    partial = out.parent / f".{out.name}.{os.getpid()}.partial"
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        line = _build(partial, questions, seed, steps)
        (partial / STAMP).write_text(json.dumps(stamp) + "\n")
        if found is not None:
            shutil.rmtree(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return f"tiny model: {out} made from seed {seed} in {time.monotonic() - started:.1f} s; {line}"


def _build(directory: Path, questions: list[Question], seed: int, warm_up: WarmUpConfig) -> str:
    from relax.models.tiny import make_tiny_omni
    from relax.models.warm_up import warm_up_format

    answers = sorted({answer for question in questions for answer in question.answers})
    sentences = [words for question in questions for _, parts in question.turns for _, words in parts]
    make_tiny_omni(directory, seed=seed, corpus=[*sentences, *answers])
    report = warm_up_format(directory, questions, seed=seed, config=warm_up)
    return (
        f"{report.num_questions} questions, well-formed answers {report.format_share:.3f}, "
        f"right by chance {report.chance_accuracy:.3f}"
    )


def _stamp(seed: int, questions: list[Question], warm_up: WarmUpConfig) -> dict[str, object]:
    made_from = hashlib.blake2b(repr((questions, warm_up)).encode(), digest_size=16).hexdigest()
    return {"version": VERSION, "seed": seed, "made_from": made_from}


def _read_stamp(out: Path) -> object:
    """Return what `out` was made from, None when there is no such directory."""
    if not out.exists():
        return None
    try:
        return json.loads((out / STAMP).read_text())
    except (OSError, ValueError) as error:
        raise WiringError(
            f"{out}: must be absent or a model that this program made, got other files; name another place"
        ) from error


if __name__ == "__main__":
    typer.run(main)
