"""Make the tiny thinker that a run without `model.path` starts from:

    python pipelines/tiny_omni.py --out data/tiny_omni-0 --seed 0 --manifest data/toy_omni/train.jsonl

Random weights, then a warm-up on the answer format alone (`relax.models.warm_up`). Of the manifest only the wording
of the questions and the sets of their answers are used, never media nor which answer is right. Nothing is done
when the directory is there already; it appears whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that the program runs from a clone that is not installed

from relax.data.manifest import Manifest, Record  # noqa: E402  (after the path)
from relax.errors import RelaxError  # noqa: E402


def main(
    out: Annotated[Path, typer.Option(help="directory to make; left as it is when it exists")],
    manifest: Annotated[Path, typer.Option(help="JSONL manifest whose questions the model learns to answer")],
    seed: Annotated[int, typer.Option(help="decides weights and warm-up")] = 0,
) -> None:
    """Make a tiny Qwen3-Omni-MoE thinker that answers in the right form, at chance."""
    if out.exists():
        typer.echo(f"tiny model: {out} is there already")
        return
    try:
        typer.echo(make(out, manifest, seed))
    except (OSError, RelaxError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def make(out: Path, manifest: Path, seed: int) -> str:
    """Make the model beside its final place, rename it there, and return one line about it."""
    import torch

    from relax.models.tiny import make_tiny_omni
    from relax.models.warm_up import questions_of, warm_up_format

    started = time.monotonic()
    torch.set_num_threads(1)  # the tensors are too small to share
    questions = questions_of(row for row in Manifest(manifest) if isinstance(row, Record))
    words = sorted({word for question in questions for word in question.answers})
    sentences = [words for question in questions for _, parts in question.turns for _, words in parts]
    partial = out.parent / f".{out.name}.{os.getpid()}.partial"
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        make_tiny_omni(partial, seed=seed, corpus=[*sentences, *words])
        report = warm_up_format(partial, questions, seed=seed)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return (
        f"tiny model: {out} made from seed {seed} in {time.monotonic() - started:.1f} s; "
        f"{report.num_questions} questions, well-formed answers {report.format_share:.3f}, "
        f"right by chance {report.chance_accuracy:.3f}"
    )


if __name__ == "__main__":
    typer.run(main)
