"""Weights and checkpoints of a real run: in shared memory, in buckets, written beside training, taken up elsewhere."""

from __future__ import annotations

import pandas as pd
import pytest
from safetensors import safe_open

from tests.kit.job import (
    GROUP_SIZE,
    PROMPTS_PER_STEP,
    Job,
    half_written,
    resume_job,
    shared_memory,
    start_job,
    toy_words,
)
from tests.kit.ledger import events, faults
from tests.loopback.test_job_resume import kill_all

pytestmark = pytest.mark.slow

NUM_STEPS = 4
RUN = (
    f"num_steps={NUM_STEPS}",
    "max_staleness=1",
    "actor.freeze_towers=true",
    "weights.where=shm",
    "weights.bucket_bytes=200000",
    "checkpoint.interval_steps=1",
    "checkpoint.keep=1",
    "checkpoint.keep_every=2",
    "checkpoint.huggingface=every",
)


@pytest.fixture(scope="module")
def moved(job_home) -> Job:
    """A run that was killed whole after its second step, and went on with two ranks."""
    before = shared_memory()
    with start_job(job_home, *toy_words(job_home), *RUN, name="moved") as job:
        job.until_step(2)
        kill_all(job)
    assert [name for name in shared_memory() - before if name.startswith("relax-")]
    with resume_job(job_home, "moved", "actor.layout.tp=2") as job:
        assert job.wait() == 0, job.describe()
        assert job.all_gone(5.0)
    assert not [name for name in shared_memory() - before if name.startswith("relax-")]
    return job


def test_run_goes_on_at_another_layout(moved):
    """Each row is trained once, and nothing is left of the first layout's processes."""
    assert (
        faults(moved.run_dir, num_steps=NUM_STEPS, prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE)
        == []
    )
    assert [event["event"] for event in events(moved.run_dir)] == ["started", "resumed", "ended"]
    assert half_written(moved.run_dir) == []
    assert not (moved.run_dir / "weights").exists()


def test_checkpoints_are_kept_by_rule_with_their_hugging_face_directories(moved):
    """Every second one and the last, the same whether it was linked or copied; each in several files."""
    found = sorted(path.name for path in (moved.run_dir / "checkpoint" / "megatron").iterdir())
    assert found == ["000002", "000004"]
    last = moved.run_dir / "checkpoint" / "huggingface"
    for directory in (*(moved.run_dir / "checkpoint" / "megatron").glob("*/huggingface"), last):
        assert (directory / "config.json").is_file()
        assert len(list(directory.glob("model-*.safetensors"))) > 2
    for path in last.glob("model-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert list(file.keys())


def test_times_and_sizes_of_publications_are_metrics(moved):
    """Gather, write and adopt; the frozen towers are written with the first version alone."""
    metrics = pd.read_parquet(moved.run_dir / "metrics.parquet")
    of_actor = metrics[metrics["role"] == "actor"].pivot_table(index="step", columns="name", values="value")
    for name in ("time/publish_gather_s", "time/publish_write_s", "time/publish_s"):
        assert (of_actor[name] > 0).all(), name
    assert (of_actor["publish/num_bytes_written"] < of_actor["publish/num_bytes"]).all()
    assert "time/adopt_s" in set(metrics[metrics["role"] == "rollout"]["name"])
