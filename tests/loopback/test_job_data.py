"""A job fed from several sources of different formats, with evaluation sets of their own and a curriculum."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from relax.observe.metrics import read_metrics
from tests.kit.job import GROUP_SIZE, NUM_STEPS, PROMPTS_PER_STEP, half_written, start_job


@pytest.fixture(scope="module")
def pictures(job_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy set's pictures in a Parquet file, as bytes, with a question and a label."""
    toy = job_home / "toy"
    lines = [json.loads(line) for line in (toy / "train.jsonl").read_text().splitlines()]
    rows = [line for line in lines if line.get("images")]
    table = pa.table(
        {
            "picture": [{"bytes": (toy / line["images"][0]).read_bytes(), "path": None} for line in rows],
            "question": ["What colour is the shape?"] * len(rows),
            "label": [line["answer"] for line in rows],
        }
    )
    path = tmp_path_factory.mktemp("pictures") / "pictures.parquet"
    pq.write_table(table, path, row_group_size=2)
    return path


@pytest.mark.slow
def test_job_mixes_sources_and_evaluates_sets_apart(job_home: Path, pictures: Path, tmp_path: Path) -> None:
    """Both sources are trained on, each set has its metrics and its place in the report, rewards come back."""
    columns = "layout: columns, fields: {prompt: question, answer: label, images: picture}"
    words = [
        f"data.sources.toy={job_home}/toy/train.jsonl",
        f"data.sources.pictures={{path: {pictures}, weight: 2, {columns}}}",
        f"data.eval.toy={job_home}/toy/eval.jsonl",
        f"data.eval.pictures={{path: {pictures}, {columns}}}",
        "data.curriculum.enabled=true",
        "data.num_workers=2",
        f"model.path={job_home}/model",
    ]
    with start_job(tmp_path, *words) as job:
        assert job.wait() == 0, job.describe()
    rollouts = pq.read_table(job.run_dir / "rollouts")
    assert rollouts.num_rows == NUM_STEPS * PROMPTS_PER_STEP * GROUP_SIZE
    assert set(rollouts["source"].to_pylist()) == {"toy", "pictures"}
    answers = pq.read_table(job.run_dir / "evaluation" / f"{NUM_STEPS:06d}.parquet")
    assert sorted(set(answers["source"].to_pylist())) == ["pictures", "toy"]
    names = set(read_metrics(job.run_dir)["name"].to_pylist())
    assert {"eval/toy/reward/image", "eval/pictures/reward/image", "eval/toy/reward/audio"} <= names
    report = (job.run_dir / "report.html").read_text()
    assert "image, pictures" in report
    assert "image, toy" in report
    assert pc.all(
        pc.equal(answers.filter(pc.equal(answers["source"], "pictures"))["modality"], "image")
    ).as_py()
    assert not (job.run_dir / "row_errors.parquet").exists()
    assert half_written(job.run_dir) == []
