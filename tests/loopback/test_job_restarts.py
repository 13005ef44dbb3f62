"""Roles of a real run that are killed or stopped: the run goes on, and its books are exact at the end."""

from __future__ import annotations

import os
import resource
import signal

import pytest

from tests.kit.job import GROUP_SIZE, PROMPTS_PER_STEP, Job, half_written
from tests.kit.ledger import events, faults

pytestmark = pytest.mark.slow

NUM_STEPS = 10
RUN = (f"num_steps={NUM_STEPS}", "max_staleness=1", "evaluation.interval_steps=4")
KEEPING = (*RUN, "checkpoint.interval_steps=2")


def faults_of(job: Job, num_steps: int = NUM_STEPS) -> list[str]:
    return faults(job.run_dir, num_steps=num_steps, prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE)


def restarted(job: Job) -> list[str]:
    """Return the services that were started again, in order."""
    return [event["service"] for event in events(job.run_dir) if event["event"] == "restarted"]


def test_roles_that_are_killed_are_started_again_alone(start):
    """Rollout, preprocess and recorder, one after another, without a journal: nothing is lost, nothing comes twice."""
    with start(*RUN) as job:
        for step, role in enumerate(("rollout", "preprocess", "recorder"), start=2):
            job.until_step(2 * step - 2)
            job.kill(role)
        assert job.wait() == 0, job.describe()
        assert job.all_gone(5.0)
    assert sorted(restarted(job)) == ["preprocess-0", "recorder-0", "rollout-0"]
    assert faults_of(job) == []
    assert half_written(job.run_dir) == []
    assert "rollout-0 was killed by SIGKILL" in (job.run_dir / "report.html").read_text()


def test_run_goes_on_with_the_other_rollout_worker(start):
    """What the dead one held goes to the other at once, long before its lease is over; the end does not wait for it."""
    with start(
        *RUN,
        "rollout.num_workers=2",
        "queue.lease_s=600",
        "restarts.first_delay_s=400",
        "restarts.max_delay_s=400",
    ) as job:
        job.until_step(2)
        job.kill("rollout")
        job.until_step(NUM_STEPS - 2)
        assert job.wait() == 0, job.describe()
    assert restarted(job) in (["rollout-0"], ["rollout-1"])
    assert faults_of(job) == []


def test_role_that_hangs_is_killed_and_started_again(start):
    """Its process is there, stopped by a signal; without heartbeats it counts as dead."""
    with start(*RUN, "restarts.silence_s=15") as job:
        job.until_step(2)
        os.kill(job.pid_of("rollout"), signal.SIGSTOP)
        assert job.wait() == 0, job.describe()
    assert [event["event"] for event in events(job.run_dir)][1:3] == ["hung", "restarted"]
    assert "after 15 s without a heartbeat" in events(job.run_dir)[2]["text"]
    assert faults_of(job) == []


def test_queue_and_actor_that_are_killed_come_back_as_they_were(start):
    """The queue from its journal, with everyone waiting for it; the actor from the last checkpoint, the run with it."""
    with start(*KEEPING) as job:
        job.until_step(3)
        job.kill("queue")
        job.until_step(5)
        job.kill("actor")
        assert job.wait() == 0, job.describe()
        assert job.all_gone(5.0)
    happened = [event["event"] for event in events(job.run_dir)]
    assert happened == ["started", "restarted", "restarted", "went_back", "ended"], events(job.run_dir)
    assert restarted(job) == ["queue", "actor"]
    assert events(job.run_dir)[3]["step"] >= 2  # that of step 4 may have been on its way to the disk
    assert faults_of(job) == []
    assert half_written(job.run_dir) == []


def test_queue_that_can_write_nothing_is_started_again(start):
    """It answers, but refuses every change: it is killed, and the next one goes on from what is on the disk."""
    with start(*KEEPING) as job:
        job.until_step(3)
        queue = job.pid_of("queue")
        _, hard = resource.prlimit(queue, resource.RLIMIT_FSIZE)
        resource.prlimit(queue, resource.RLIMIT_FSIZE, (0, hard))
        assert job.wait() == 0, job.describe()
    assert "queue" in restarted(job)
    assert any("could not write its journal" in event["text"] for event in events(job.run_dir))
    assert faults_of(job) == []


def test_weights_that_are_half_published_are_never_adopted(start):
    """The actor dies in the middle of a publish: the run goes back, and no row has been made by what it left."""
    with start(*KEEPING, "num_steps=16") as job:
        job.until_step(3)
        half: list[str] = []

        def is_publishing() -> bool:
            half[:] = [path.name for path in (job.run_dir / "weights").glob(".*.partial")]
            return bool(half)

        while not is_publishing():
            assert job.process.poll() is None, job.describe()
        job.kill("actor")
        assert job.wait() == 0, job.describe()
    assert "went_back" in [event["event"] for event in events(job.run_dir)]
    assert faults_of(job, 16) == []
    assert half_written(job.run_dir) == []
