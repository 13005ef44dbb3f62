"""The actor as several processes that the program starts itself: a whole run, and the end of one rank."""

from __future__ import annotations

import os
import signal

import pandas as pd
import psutil
import pytest

from tests.kit.job import GROUP_SIZE, NUM_STEPS, PROMPTS_PER_STEP, Job, half_written
from tests.kit.ledger import events, faults

pytestmark = pytest.mark.slow


def rank_pid(job: Job, rank: int) -> int:
    """Return the process of a rank of the actor, or 0 before it has one."""
    for process in job.processes():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if (
            "relax.roles" in command
            and "actor" in command
            and command[command.index("--index") + 1] == str(rank)
        ):
            return process.pid
    return 0


@pytest.mark.parametrize(
    "words",
    [("actor.layout.dp=2", "algorithm=ppo"), ("actor.layout.pp=2", "rollout.layers_per_column=1")],
    ids=["dp", "pp"],
)
def test_run_on_two_ranks_trains_every_row_once(start, words):
    """All steps are done, each row is trained once, weights and both checkpoints are written, nothing is left."""
    with start(*words) as job:
        assert job.wait() == 0, job.describe()
        assert job.last_line == "ended: all steps done"
        assert job.all_gone(5.0)
    rollouts = pd.read_parquet(job.run_dir / "rollouts")
    assert rollouts["uid"].is_unique
    rows = rollouts.groupby("optimizer_step").size()
    assert rows.to_dict() == dict.fromkeys(range(1, NUM_STEPS + 1), PROMPTS_PER_STEP * GROUP_SIZE)
    assert all(len(row) for row in rollouts["trainer_logprobs"])
    difference = max(
        abs(ours - theirs)
        for row in rollouts.itertuples()
        if row.staleness == 0
        for ours, theirs in zip(row.trainer_logprobs, row.rollout_logprobs, strict=True)
    )
    assert difference < 1e-3  # fresh weights: trainer on two ranks and engine speak of one policy
    assert (job.run_dir / "weights" / f"{NUM_STEPS:06d}" / "model.safetensors").is_file()
    assert (job.run_dir / "checkpoint" / "huggingface" / "model.safetensors").is_file()
    assert {path.name for path in (job.run_dir / "logs").glob("actor-*")} == {"actor-0.log", "actor-1.log"}
    assert half_written(job.run_dir) == []


def test_death_of_a_rank_is_the_role_s(start):
    """The run ends with that rank named, and its neighbour does not outlive it."""
    with start("num_steps=100000", "max_staleness=2", "actor.layout.dp=2") as job:
        job.until_step(1)
        os.kill(rank_pid(job, 1), signal.SIGKILL)
        assert job.wait(30.0) == 1, job.describe()
        assert "actor-1 was killed by SIGKILL" in job.last_line
        assert job.all_gone(5.0)


def test_run_goes_back_as_a_whole_when_one_rank_dies(start):
    """Both ranks start again from the checkpoint and meet at another place; each row is still trained on once."""
    num_steps = 8
    words = (f"num_steps={num_steps}", "max_staleness=1", "checkpoint.interval_steps=2")
    with start(*words, "actor.layout.dp=2") as job:
        job.until_step(3)
        first = rank_pid(job, 0)
        os.kill(rank_pid(job, 1), signal.SIGKILL)
        job.until(lambda: rank_pid(job, 0) not in (0, first))
        assert job.wait() == 0, job.describe()
        assert job.all_gone(5.0)
    assert [event["event"] for event in events(job.run_dir)] == ["started", "restarted", "went_back", "ended"]
    found = faults(job.run_dir, num_steps=num_steps, prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE)
    assert found == []
    assert half_written(job.run_dir) == []
