"""Train an omni-modal model by GRPO: `python pipelines/omni_grpo.py [--config FILE] [key=value ...]`.

`resume=runs/<name>` goes on with a run that was broken off or has ended, from its newest checkpoint (`resume_step=N`:
from that one) and with its own configuration; `num_steps` may be raised.

Without arguments it makes a data set of real media files and a tiny Qwen3-Omni-MoE thinker once, trains it on this
machine and leaves recorded rollouts, checkpoints, metrics and a report under `runs/`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that the program runs from a clone that is not installed

from relax.config import RunConfig, load_config, save_config  # noqa: E402  (after the path)
from relax.data.config import SourceConfig  # noqa: E402
from relax.errors import ConfigError, RelaxError, ServiceError  # noqa: E402
from relax.run.attachment import check_server  # noqa: E402
from relax.run.directory import held, make_run_dir, release_run_dir  # noqa: E402
from relax.run.driver import Driver, Outcome, Resume  # noqa: E402
from relax.run.resuming import ResumeRequest, read_words, resumed_config  # noqa: E402
from relax.run.wiring import check_wiring  # noqa: E402

DEFAULT_CONFIG = ROOT / "conf" / "omni_grpo.yaml"
PREPARE_DEADLINE_S = 600
SHOWN_ROW_ERRORS = 10


def main(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, e.g. max_staleness=4 seed=2 name=k4")
    ] = None,
    config: Annotated[
        Path, typer.Option(help="YAML file with what differs from the defaults")
    ] = DEFAULT_CONFIG,
) -> None:
    """Check the configuration, prepare data and model where none are given, run, report."""
    try:
        request = read_words(overrides or [])
        if request is not None:
            outcome = go_on(request)
        else:
            settings = load_config([config], overrides or [])
            check_wiring(settings)
            outcome = launch(settings)
    except RelaxError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error
    show(outcome)
    raise typer.Exit(outcome.exit_code)


def launch(config: RunConfig) -> Outcome:
    """Prepare what is missing, check the wiring with it, and carry the run through."""
    run_dir = make_run_dir(Path(config.run_root), config.name, overwrite=config.overwrite)
    try:
        _prepare(config)
        specs = check_wiring(config)
        if config.queue.uri is not None:
            shown = config.queue.credentials
            credentials = None if shown is None else Path(shown)
            check_server(config.queue.uri, list(specs), overwrite=config.overwrite, credentials=credentials)
    except BaseException:
        release_run_dir(run_dir)
        raise
    save_config(config, run_dir / "config.yaml")
    _share_clone()
    typer.echo(f"run {run_dir.name}: logs, rollouts and metrics under {run_dir}")
    model_dir = Path(config.model.path or "")
    return Driver(config, specs, run_dir.resolve(), model_dir.resolve()).run()


def go_on(request: ResumeRequest) -> Outcome:
    """Carry a run on that was broken off, or has ended, in its own directory."""
    config = resumed_config(request)
    specs = check_wiring(config)
    run_dir = request.run_dir.resolve()
    with held(run_dir):
        save_config(config, run_dir / "config.yaml")
    _share_clone()
    typer.echo(f"run {run_dir.name}: goes on, logs, rollouts and metrics under {run_dir}")
    model_dir = Path(config.model.path or "")
    return Driver(config, specs, run_dir, model_dir.resolve(), Resume(step=request.step)).run()


def _share_clone() -> None:
    """Let services import from a clone that is not installed, as this program does."""
    if (ROOT / "pyproject.toml").is_file():
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{inherited}" if inherited else str(ROOT)


def _prepare(config: RunConfig) -> None:
    """Make the toy data set and the tiny model where the configuration names none."""
    if not config.data.train_sources():
        data_dir = Path("data/toy_omni")
        _step("data set", [ROOT / "pipelines" / "toy_omni.py", "--out", data_dir])
        config.data.manifest = str(data_dir / "train.jsonl")
        config.data.eval = config.data.eval or {"toy": SourceConfig(path=str(data_dir / "eval.jsonl"))}
    if config.model.path is None:
        model_dir = Path(f"data/tiny_omni-{config.seed}")
        words = ["--out", model_dir, "--seed", config.seed]
        for source in config.data.train_sources().values():
            words += ["--source", json.dumps(asdict(source))]
        _step("tiny model", [ROOT / "pipelines" / "tiny_omni.py", *words])
        config.model.path = str(model_dir)


def _step(what: str, words: list[object]) -> None:
    try:
        done = subprocess.run([sys.executable, *map(str, words)], timeout=PREPARE_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"{what}: must be made within {PREPARE_DEADLINE_S} s, got nothing") from error
    if done.returncode:
        raise ServiceError(f"{what}: making it must succeed, got exit code {done.returncode}; see above")


def show(outcome: Outcome) -> None:
    """Print the rows that were refused, the rewards of the last evaluation, and how the run ended."""
    if outcome.row_errors is not None and outcome.row_errors.num_rows:
        _show_row_errors(outcome.row_errors)
    for modality, reward in outcome.rewards.items():
        typer.echo(f"reward {modality:>8}: {reward:.3f}")
    if outcome.report is not None:
        typer.echo(f"report: {outcome.report}")
    typer.echo(
        f"{'ended' if outcome.exit_code == 0 else 'failed'}: {outcome.reason}", err=outcome.exit_code != 0
    )


def _show_row_errors(errors: pa.Table) -> None:
    count = errors.num_rows
    typer.echo(f"{count} {'row was' if count == 1 else 'rows were'} refused; all of them: row_errors.parquet")
    for error in errors.slice(0, SHOWN_ROW_ERRORS).to_pylist():
        typer.echo(f"  {error['stage']}: {error['place']}: {error['reason']}")
    if count > SHOWN_ROW_ERRORS:
        typer.echo(f"  ... and {count - SHOWN_ROW_ERRORS} more")


if __name__ == "__main__":
    typer.run(main)
