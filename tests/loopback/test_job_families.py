"""Whole runs on models of other families: text alone, dense and with experts, and pictures and films in frames."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from tests.kit.families import make_family
from tests.kit.job import ENTRY, GROUP_SIZE, NUM_STEPS, PROMPTS_PER_STEP, start_job

pytestmark = pytest.mark.slow

TEXT_ROWS = [
    {"messages": [{"role": "user", "content": f"What colour is shape {number}?"}], "answer": "red"}
    for number in range(8)
]


def manifest(path: Path, rows: list[dict]) -> Path:
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(toy: Path, *kinds: str) -> list[dict]:
    """Return the toy data set's rows that have one of these media, with absolute paths."""
    rows = []
    for line in (toy / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        for kind in kinds:
            if row.get(kind):
                rows.append(row | {kind: [str(toy / path) for path in row[kind]]})
    return rows


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "qwen3_vl"])
def test_run_on_another_family_trains_every_row(job_home, tmp_path, name):
    """All steps are done on policy, and the weights are written for transformers again."""
    model = make_family(tmp_path / name, name, speaks=True)
    rows = rows_of(job_home / "toy", "images", "videos") if name == "qwen3_vl" else TEXT_ROWS
    train = manifest(tmp_path / "train.jsonl", rows)
    words = (f"model.path={model}", f"data.manifest={train}", f"data.eval.held_out={train}")
    with start_job(tmp_path, *words, "max_staleness=0") as job:
        assert job.wait() == 0, job.describe()
    assert job.last_line == "ended: all steps done"
    rollouts = pd.read_parquet(job.run_dir / "rollouts")
    assert len(rollouts) == NUM_STEPS * PROMPTS_PER_STEP * GROUP_SIZE
    assert abs(rollouts["importance_ratio"] - 1).max() < 1e-3
    assert rollouts["routed_experts"].notna().all() == (name == "qwen3_moe")
    assert (job.run_dir / "checkpoint" / "huggingface" / "model.safetensors").is_file()


def test_media_that_the_model_cannot_take_are_refused_before_the_start(job_home, tmp_path):
    """Place, rule, value; nothing is started."""
    model = make_family(tmp_path / "model", "qwen3", speaks=True)
    train = manifest(tmp_path / "train.jsonl", [*TEXT_ROWS, *rows_of(job_home / "toy", "images")])
    command, environment = ENTRY
    words = [f"model.path={model}", f"data.manifest={train}"]
    done = subprocess.run(
        [*command, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert (
        f"error: train.jsonl:9: media must be for a tower of model.path '{model}' (none, it reads text alone), "
        "got 'image' for 'image'; choose another model or leave such rows out" in done.stderr
    )
