"""A short series of faults by a seed, as `tools/chaos.py` runs longer ones: exit 0 says that the books hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.job import REPOSITORY, toy_words

pytestmark = pytest.mark.slow

SMALL = (
    "num_steps=40",
    "prompts_per_step=4",
    "group_size=4",
    "checkpoint.interval_steps=3",
    "evaluation.interval_steps=20",
    "evaluation.max_prompts=4",
    "rollout.reward=exact_match",
)
DEADLINE_S = 600.0


def chaos(home: Path, job_home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "tools" / "chaos.py"), "--home", str(home), "--controls", "0"]
    command += [*words, *SMALL, *toy_words(job_home)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_series_of_faults_keeps_the_books(job_home, tmp_path):
    """A torn journal, the actor killed in a checkpoint, everything and a resume, the queue, a cut: nothing is lost."""
    kinds = "kill,kill_in_checkpoint,cut,torn_journal"
    done = chaos(tmp_path, job_home, "--seed", "17", "--faults", "5", "--kinds", kinds)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-8000:]}"
    assert done.stdout.startswith("5 faults in ")
    assert " hold" in done.stdout


def test_series_that_cannot_begin_says_why_and_how_to_repeat_it(job_home, tmp_path):
    """A job that is refused is a failed series: exit 1, the program's own words, the seed, what was left."""
    done = chaos(tmp_path, job_home, "--seed", "5", "--faults", "1", "max_staleness=-1")
    assert done.returncode == 1
    assert "FAILED: run chaos-5-0: the run must begin, got its end: error: max_staleness" in done.stdout
    assert "again: python tools/chaos.py" in done.stdout
    assert "--seed 5" in done.stdout
    assert (tmp_path / "failed" / "chaos-5-0" / "program.out").is_file()
