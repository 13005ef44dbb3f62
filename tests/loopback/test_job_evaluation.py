"""Evaluation of chosen versions while training goes on: each answer is of the version that was asked for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pandas as pd
import pytest

from tests.kit.job import Job

NUM_STEPS = 9
CHOSEN = [0, 3, 4, 8, 9]
WORDS = (
    f"num_steps={NUM_STEPS}",
    "evaluation.interval_steps=4",
    "evaluation.versions=[3]",
    "checkpoint.keep_snapshots=2",
)


def check_versions(job: Job) -> None:
    """Fail unless every chosen version was evaluated by its own weights, and no other."""
    found = {int(path.stem): pd.read_parquet(path) for path in (job.run_dir / "evaluation").glob("*.parquet")}
    assert sorted(found) == CHOSEN
    for version, rows in found.items():
        assert len(rows) == 6
        for name in ("policy_version_start", "policy_version_end", "evaluated_policy_version"):
            assert set(rows[name]) == {version}, name
        assert {token for row in rows["token_policy_versions"] for token in row} == {version}
    left = {int(path.name[:6]) for path in (job.run_dir / "weights").glob("[0-9]*")}
    assert left <= {*CHOSEN, NUM_STEPS - 1, NUM_STEPS}
    assert not left & {1, 2, 5, 6, 7}


def behind(job: Job) -> dict[int, float]:
    """Return by how many versions training was ahead when each round was complete."""
    metrics = pd.read_parquet(job.run_dir / "metrics.parquet")
    chosen = metrics[metrics["name"] == "evaluation/behind_versions"]
    return dict(zip(chosen["step"], chosen["value"], strict=True))


@pytest.mark.slow
def test_training_goes_on_while_versions_are_evaluated(start: Callable) -> None:
    """The evaluation service stands still for six steps; then it answers each version, long since overtaken."""
    with start(*WORDS, "evaluation.num_workers=1", "max_staleness=1") as job:
        log = job.run_dir / "logs" / "evaluation-0.log"
        job.until(lambda: log.is_file() and "started" in log.read_text())
        os.kill(job.pid_of("evaluation"), signal.SIGSTOP)
        try:
            job.until_step(6)
        finally:
            os.kill(job.pid_of("evaluation"), signal.SIGCONT)
        assert job.wait() == 0, job.describe()
    check_versions(job)
    assert min(behind(job)[version] for version in (0, 3, 4)) >= 2


@pytest.mark.slow
def test_rollout_services_answer_the_version_asked_for(start: Callable) -> None:
    """Without services of its own an evaluation is answered between training prompts, by older weights for a moment."""
    with start(*WORDS, "max_staleness=1") as job:
        assert job.wait() == 0, job.describe()
    check_versions(job)
    rows = pd.read_parquet(job.run_dir / "rollouts")
    assert set(rows["staleness"]) <= {0, 1}
    assert set(rows["optimizer_step"]) == set(range(1, NUM_STEPS + 1))
