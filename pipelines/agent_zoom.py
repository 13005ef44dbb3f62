"""Train an agent that looks closer: `python pipelines/agent_zoom.py [--config FILE] [key=value ...]`.

The task is that of `pipelines/zoom_task.py`: the colour of a sign that is too small for the model, which it sees after
it has said `zoom N`. Pictures and a tiny Qwen3-Omni-MoE thinker are made once under `data/`. The model starts with the
form of answers alone (`relax.models.warm_up`): one of four colours or of four zooms to the question, one of four
colours after a zoom, all at random and without having seen a picture. The rest is that of `pipelines/omni_grpo.py`.

Without the tool nobody is right more often than one in four. Who zooms twice anywhere, and reads what is there, is
right in 0.625 of the cases at most: the lighter quadrant is among the two in half of them, else one in four is guessed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that the program runs from a clone that is not installed

from pipelines.omni_grpo import PREPARE_DEADLINE_S, launch, show  # noqa: E402  (after the path)
from pipelines.zoom_task import COLOURS, QUESTION, ZOOMS, ZoomSpec, make_zoom_data  # noqa: E402
from relax.config import RunConfig, load_config  # noqa: E402
from relax.data.config import SourceConfig  # noqa: E402
from relax.errors import ConfigError, RelaxError, ServiceError  # noqa: E402

DEFAULT_CONFIG = ROOT / "conf" / "agent_zoom.yaml"

app = typer.Typer(add_completion=False)


@app.command()
def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. seed=2")] = None,
    config: Annotated[
        Path, typer.Option(help="YAML file with what differs from the defaults")
    ] = DEFAULT_CONFIG,
    make_model: Annotated[Path | None, typer.Option(help="only make the model there", hidden=True)] = None,
) -> None:
    """Make pictures and model where there are none, and train."""
    try:
        settings = load_config([config], overrides or [])
        if make_model is not None:
            typer.echo(warm_model(make_model, settings.seed))
            return
        prepare(settings)
        outcome = launch(settings)
    except (OSError, RelaxError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error
    show(outcome)
    raise typer.Exit(outcome.exit_code)


def prepare(config: RunConfig, data: Path = Path("data"), spec: ZoomSpec | None = None) -> None:
    """Make the pictures and the model where the configuration names none."""
    if not config.data.train_sources():
        train, held_out = make_zoom_data(data / "zoom", spec)
        config.data.manifest = str(train)
        config.data.eval = config.data.eval or {"zoom": SourceConfig(path=str(held_out))}
    if config.model.path is None:
        model_dir = data / f"tiny_zoom-{config.seed}"
        # In a process of its own, so that torch is not loaded here.
        words = [sys.executable, str(Path(__file__)), "--make-model", str(model_dir), f"seed={config.seed}"]
        try:
            done = subprocess.run(words, timeout=PREPARE_DEADLINE_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise ServiceError(
                f"tiny model: must be made within {PREPARE_DEADLINE_S} s, got nothing"
            ) from error
        if done.returncode:
            raise ServiceError(
                f"tiny model: making it must succeed, got exit code {done.returncode}; see above"
            )
        config.model.path = str(model_dir)


def warm_model(model_dir: Path, seed: int) -> str:
    """Make the model unless it is there, and return one line about it."""
    from pipelines.tiny_omni import make_from
    from relax.models.warm_up import Question

    colours = tuple(sorted(COLOURS))
    asked = ("user", (("image", ""), ("text", QUESTION)))
    questions = [Question((asked,), tuple(sorted((*colours, *ZOOMS))))]
    for zoom in ZOOMS:
        shown = (("assistant", (("text", zoom),)), ("user", (("image", ""),)))
        questions.append(Question((asked, *shown), colours))
    return make_from(model_dir, questions, seed)


if __name__ == "__main__":
    app()
