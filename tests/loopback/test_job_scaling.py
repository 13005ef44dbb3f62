"""A real run whose rollout services come and go, and one whose rollouts are interrupted at every update."""

from __future__ import annotations

import os
import subprocess
import sys

import pandas as pd
import pytest

from tests.kit.job import GROUP_SIZE, PROMPTS_PER_STEP, REPOSITORY, Job, half_written
from tests.kit.ledger import events, faults

pytestmark = pytest.mark.slow


def scale(job: Job, number: int) -> str:
    """Ask the run for so many rollout services, as people do."""
    command = [sys.executable, "-m", "relax.run.scale", "--run", str(job.run_dir), f"rollout={number}"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr + job.describe()
    return done.stdout


def newest_version(job: Job) -> int:
    """Return the newest weights that are published."""
    return max(int(path.name[:6]) for path in (job.run_dir / "weights").glob("[0-9]*"))


def faults_of(job: Job, num_steps: int) -> list[str]:
    return faults(job.run_dir, num_steps=num_steps, prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE)


def worker_has_answered(job: Job, worker: str) -> bool:
    """Whether a rollout of that service is recorded."""
    files = list((job.run_dir / "rollouts").glob("[0-9]*.parquet"))
    return any(
        worker in set(pd.read_parquet(file, columns=["rollout_worker"])["rollout_worker"]) for file in files
    )


def test_run_goes_on_while_rollout_services_come_and_go(start):
    """From one to two and back: nothing is lost, and the newcomer's rows are of no older weights than it found."""
    with start("num_steps=400", "max_staleness=1", "evaluation.interval_steps=0") as job:
        job.until_step(2)
        found = newest_version(job)
        assert scale(job, 2) == "rollout services: 1 -> 2\n"
        job.until(lambda: worker_has_answered(job, "rollout-1"))
        assert scale(job, 1) == "rollout services: 2 -> 1\n"
        job.until(lambda: "rollout" in job.describe() and not _is_running(job, 1))
        job.until_step(newest_version(job) + 2)
        job.interrupt()
        assert job.wait() == 0, job.describe()
        assert job.all_gone(5.0)
    rows = pd.read_parquet(job.run_dir / "rollouts")
    assert set(rows["rollout_worker"]) == {"rollout-0", "rollout-1"}
    assert rows.loc[rows["rollout_worker"] == "rollout-1", "policy_version_start"].min() >= found
    assert faults_of(job, int(rows["optimizer_step"].max())) == []
    assert [event["text"] for event in events(job.run_dir) if event["event"] == "scaled"] == [
        "1 rollout service(s) become 2",
        "2 rollout service(s) become 1",
    ]
    assert [event["event"] for event in events(job.run_dir) if event["event"] == "restarted"] == []
    assert half_written(job.run_dir) == []


def _is_running(job: Job, index: int) -> bool:
    words = ["relax.roles", "rollout", "--index", str(index)]
    commands = [process.cmdline() for process in job.processes()]
    return any(command[at : at + 4] == words for command in commands for at in range(len(command)))


def test_run_whose_rollouts_are_interrupted_trains_and_loses_nothing(start):
    """Rows of several policies are trained on within the bound, each token under the version that sampled it."""
    num_steps = 8
    words = (
        f"num_steps={num_steps}",
        "max_staleness=2",
        "evaluation.interval_steps=0",
        "rollout.max_new_tokens=48",
        "rollout.partial.enabled=true",
        "rollout.partial.train_on=newest",
        "rollout.oversample=1",
        "rollout.num_workers=2",
    )
    with start(*words) as job:
        assert job.wait() == 0, job.describe()
    assert faults_of(job, num_steps) == []
    rows = pd.read_parquet(job.run_dir / "rollouts")
    spans = rows["token_policy_versions"].map(lambda versions: len(set(versions)))
    assert (spans > 1).any()
    for row in rows.itertuples():
        versions = row.token_policy_versions.tolist()
        assert versions == sorted(versions)
        assert (versions[0], versions[-1]) == (row.policy_version_start, row.policy_version_end)
        assert row.routed_experts_shape[0] == len(row.prompt_token_ids) + len(versions) - 1
        assert 0 <= row.staleness <= 2
    metrics = pd.read_parquet(job.run_dir / "metrics.parquet")
    counted = metrics[metrics["name"].str.startswith("partial/")].groupby("name")["value"].sum()
    assert counted["partial/continued"] > 0
    assert counted["partial/tokens_saved"] > 0
    masked = metrics[metrics["name"] == "stale_token_fraction"]
    assert masked["value"].max() > 0
    assert half_written(job.run_dir) == []
