"""How a run ends before its time: Ctrl-C once and twice, a role that dies, the program killed."""

from __future__ import annotations

import json
import os
import signal
import time

import pandas as pd
import pytest

from tests.kit.job import GROUP_SIZE, PROMPTS_PER_STEP, half_written

pytestmark = pytest.mark.slow

ENDS_WITHIN_S = 10.0
LONG = ("num_steps=100000", "max_staleness=2")


def test_first_ctrl_c_drains_and_the_run_counts_as_done(start):
    """Exit 0 with checkpoint, report and every trained row in the records; no process is left."""
    with start(*LONG) as job:
        job.until_step(3)
        job.interrupt()
        assert job.wait(60.0) == 0, job.describe()
        assert job.last_line == "ended: drained on Ctrl-C"
        assert job.all_gone(5.0)
    rollouts = pd.read_parquet(job.run_dir / "rollouts")
    (checkpoint,) = (job.run_dir / "checkpoint" / "megatron").iterdir()
    assert int(checkpoint.name) == rollouts["optimizer_step"].max() >= 3
    assert len(rollouts) == int(checkpoint.name) * PROMPTS_PER_STEP * GROUP_SIZE
    assert rollouts["uid"].is_unique
    assert (rollouts["staleness"] <= 2).all()
    assert (job.run_dir / "checkpoint" / "huggingface" / "model.safetensors").is_file()
    assert "drained on Ctrl-C" in (job.run_dir / "report.html").read_text()
    assert half_written(job.run_dir) == []


def test_second_ctrl_c_stops_at_once(start):
    """Exit 130 within seconds, whatever the actor is at; what was trained on is in the records."""
    with start(*LONG) as job:
        job.until_step(2)
        os.kill(job.pid_of("actor"), signal.SIGSTOP)  # so that draining would last for ever
        job.interrupt()
        job.until(lambda: "draining" in job.output, 10.0)
        job.interrupt()
        assert job.wait(ENDS_WITHIN_S) == 130, job.describe()
        assert job.last_line == "failed: stopped at once on the second Ctrl-C"
        assert job.all_gone(5.0)
    assert half_written(job.run_dir) == []


def test_second_ctrl_c_stops_a_run_that_is_starting(start):
    """Nothing is waited for that is not there yet."""
    with start(*LONG) as job:
        job.until(lambda: job.pid_of("recorder") > 0)
        job.interrupt()
        job.until(lambda: "draining" in job.output, 10.0)
        job.interrupt()
        assert job.wait(ENDS_WITHIN_S) == 130, job.describe()
        assert job.all_gone(5.0)


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("queue", ()),
        ("actor", ()),
        ("rollout", ("restarts.max=0",)),
        ("preprocess", ("restarts.max=0",)),
        ("recorder", ("restarts.max=0",)),
    ],
)
def test_role_that_is_killed_for_good_ends_the_run(start, role, words):
    """Without a journal to come back from, or without restarts: within ten seconds, not with exit 0, the role named
    last, no process left, no half-written file.
    """
    with start(*LONG, *words) as job:
        if role in ("recorder", "rollout", "actor"):
            job.until_step(2)
        job.kill(role)
        killed_s = time.monotonic()
        assert job.wait(ENDS_WITHIN_S) == 1, job.describe()
        assert job.all_gone(max(0.0, ENDS_WITHIN_S - (time.monotonic() - killed_s)))
    if role == "recorder":  # it had received rows that no consumer would get again
        assert len(pd.read_parquet(job.run_dir / "rollouts")) % (PROMPTS_PER_STEP * GROUP_SIZE) == 0
    name = role if role == "queue" else f"{role}-0"
    assert job.last_line.startswith(f"failed: {name} was killed by SIGKILL"), job.describe()
    assert half_written(job.run_dir) == []


def test_role_that_exits_as_if_all_were_well_ends_the_run(start, job_home):
    """A plug-in's sys.exit(0) is the failure of the role that it runs in, shown last."""
    line = {
        "messages": [{"role": "user", "content": "<leaving>?"}],
        "leavings": ["model/config.json"],
        "answer": "a",
    }
    manifest = job_home / "leaving.jsonl"
    manifest.write_text(json.dumps(line) + "\n")
    with start(f"data.manifest={manifest}", "modalities.extra=[my_modalities:Leaving]") as job:
        assert job.wait(60.0) == 1, job.describe()
        assert job.all_gone(5.0)
    log = job.run_dir / "logs" / "preprocess-0.log"
    assert job.last_line == f"failed: preprocess-0 exited with code 1: ERROR SystemExit: 0 (log: {log})"


def test_program_that_is_killed_leaves_no_process(start):
    """Not even by `kill -9`: services see it, and a guardian ends what does not."""
    with start(*LONG) as job:
        job.until_step(1)
        job.process.kill()
        assert job.wait(5.0) == -signal.SIGKILL
        assert job.all_gone(ENDS_WITHIN_S), [each.cmdline() for each in job.processes()]
