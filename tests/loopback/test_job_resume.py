"""A run of which every process is killed, and that goes on from a checkpoint: as if nothing had been."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.kit.job import GROUP_SIZE, PROMPTS_PER_STEP, Job, half_written, resume_job, start_job, toy_words
from tests.kit.ledger import actor_metrics, events, faults

pytestmark = pytest.mark.slow

NUM_STEPS = 8
RUN = (f"num_steps={NUM_STEPS}", "max_staleness=0", "checkpoint.interval_steps=2", "checkpoint.keep=3")


def kill_all(job: Job) -> None:
    """End every process of a job by SIGKILL, the driver first."""
    job.process.kill()
    for process in job.processes():
        with suppress(psutil.Error):
            process.kill()
    job.process.wait(10)


@pytest.fixture(scope="module")
def undisturbed(job_home: Path) -> Path:
    """The directory of a run that nobody disturbed."""
    with start_job(job_home, *toy_words(job_home), *RUN, name="undisturbed") as job:
        assert job.wait() == 0, job.describe()
    return job.run_dir


@pytest.fixture(scope="module")
def broken(job_home: Path) -> Path:
    """The directory of a run that was killed whole after its fifth step."""
    with start_job(job_home, *toy_words(job_home), *RUN, name="broken") as job:
        job.until_step(5)
        kill_all(job)
    return job.run_dir


@pytest.mark.parametrize("words", [(), ("resume_step=2",)])
def test_resumed_run_ends_as_if_nothing_had_been(job_home, undisturbed, broken, words):
    """On policy with one worker the metrics are the same to the bit, from the newest checkpoint or an older one."""
    run_dir = shutil.copytree(broken, broken.with_name("resumed"))
    try:
        with resume_job(job_home, "resumed", *words) as job:
            assert job.wait() == 0, job.describe()
        assert (
            faults(run_dir, num_steps=NUM_STEPS, prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE)
            == []
        )
        before, after = actor_metrics(undisturbed), actor_metrics(run_dir)
        assert after.equals(before[after.columns]), (before - after).abs().max()
        assert [event["event"] for event in events(run_dir)] == ["started", "resumed", "ended"]
        assert events(run_dir)[1]["step"] in ((2,) if words else (2, 4, 5, 6))  # 4 may have been on its way
        assert half_written(run_dir) == []
        assert "resumed after step" in (run_dir / "report.html").read_text()
    finally:
        shutil.rmtree(run_dir)


def test_finished_run_goes_on_with_more_steps(job_home, undisturbed):
    """Its last checkpoint is one like the others; what it recorded stays."""
    run_dir = shutil.copytree(undisturbed, undisturbed.with_name("longer"))
    with resume_job(job_home, "longer", f"num_steps={NUM_STEPS + 2}") as job:
        assert job.wait() == 0, job.describe()
    assert (
        faults(run_dir, num_steps=NUM_STEPS + 2, prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE)
        == []
    )


def test_run_that_is_going_on_cannot_be_resumed(job_home):
    """Nor by mistake: exit 2, and the run does not notice."""
    words = ("num_steps=100000", "max_staleness=1", "checkpoint.interval_steps=50")
    with start_job(job_home, *toy_words(job_home), *words, name="busy") as job:
        job.until_step(1)
        with resume_job(job_home, "busy") as second:
            assert second.wait(60.0) == 2
            assert "must be nobody else's, got a run that is going on" in second.output
        job.interrupt()
        assert job.wait(60.0) == 0, job.describe()
