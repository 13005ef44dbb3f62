"""Where a run keeps its things. It creates and names directories; it writes nothing into them.

runs/<name>/config.yaml      the configuration as it ran
runs/<name>/logs/            one file a service
runs/<name>/weights/         the last published snapshots
runs/<name>/rollouts/        recorded rollouts, Parquet, one file a policy version
runs/<name>/checkpoint/      huggingface/ and megatron/<step>/
runs/<name>/metrics.parquet  every metric; TensorBoard events lie in tensorboard/
runs/<name>/report.html      the run on one page
"""

from __future__ import annotations

import shutil
from pathlib import Path

from relax.errors import ConfigError

DEFAULT_NAME = "omni_grpo"


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
