"""Rewards in worker processes: hanging, crashing and greedy plug-ins cost their attempt and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from relax.rewards.config import RewardPart
from relax.rewards.math_equivalence import MathEquivalence
from relax.rewards.scorer import Score
from tests.kit.job import PLUGINS, REPOSITORY
from tests.kit.rewards import sample, scorer

DEADLINE_S = 20.0


@pytest.fixture(autouse=True)
def plug_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kit's plug-ins can be imported here and in workers."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGINS), os.environ.get("PYTHONPATH", "")]))
    yield
    assert not [
        process
        for process in psutil.Process().children()
        if "relax.rewards.worker" in " ".join(process.cmdline())
    ]


def bad(name: str, **settings) -> RewardPart:
    return RewardPart(name=f"bad_rewards:{name}", **settings)


def test_plug_in_runs_in_a_worker_and_may_print():
    """Options arrive, standard output is not the protocol's, one process serves all."""
    with scorer(bad("length", options={"scale": 0.5}), bad("prints")) as made:
        scores = made.score([sample("four"), sample("")])
        assert scores == [
            Score(reward=3.0, parts={"length": 2.0, "prints": 1.0}),
            Score(reward=1.0, parts={"length": 0.0, "prints": 1.0}),
        ]
        assert len(made.worker_pids()) == 1
        assert os.getpid() not in made.worker_pids()


def test_hanging_plug_in_is_killed_and_tried_again():
    """Three attempts with pauses that are noted; the samples around it are scored by the workers that follow."""
    pauses: list[float] = []
    with scorer(bad("hangs", time_limit_s=0.3), pauses=pauses) as made:
        scores = made.score([sample("a"), sample("hang"), sample("b")])
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0]
    assert scores[1] == Score(
        reward=0.0, parts={"hangs": None}, error="hangs: must end within 0.3 s, got no end"
    )
    assert len(pauses) == 2
    assert 0 <= pauses[0] <= 0.5
    assert 0 <= pauses[1] <= 1.0


def test_plug_in_that_ends_its_process_costs_its_row():
    """`os._exit(0)` is no answer."""
    with scorer(bad("leaves"), retries=1) as made:
        scores = made.score([sample("leave"), sample("stay")])
    assert [score.error for score in scores] == ["leaves: must not end its process, got exit code 0", ""]


def test_crash_that_does_not_come_again_is_healed_by_a_retry(tmp_path: Path):
    """The second attempt has a new process."""
    with scorer(bad("leaves_once", options={"mark": str(tmp_path / "mark")})) as made:
        assert made.score([sample("x")]) == [Score(reward=1.0, parts={"leaves_once": 1.0})]


def test_children_of_a_killed_plug_in_go_with_it(tmp_path: Path):
    """The whole process group."""
    pids = tmp_path / "pid"
    with scorer(bad("has_children", time_limit_s=2.0, options={"pids": str(pids)}), retries=0) as made:
        assert "no end" in made.score([sample("x")])[0].error
    child = int(pids.read_text())
    end_s = time.monotonic() + DEADLINE_S
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end_s
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("fails", "KeyError: 'colour'"),
        ("words", "ValueError: could not convert string to float: 'good'"),
        ("infinite", "the reward must be finite in 32 bits, got inf"),
        ("judged", "the judge did not answer"),
        ("exits", "SystemExit: enough"),
        ("eats_memory", "MemoryError:"),
    ],
)
def test_fault_of_a_plug_in_is_its_row_error(name: str, error: str):
    """An exception, a non-number, a verdict, too much memory: a reason, and the worker goes on."""
    with scorer(bad(name), RewardPart(name="exact_match"), retries=0) as made:
        first, second = made.score([sample("red"), sample("red")])
    assert (
        first == second == Score(reward=0.0, parts={name: None, "exact_match": 1.0}, error=f"{name}: {error}")
    )


def test_pattern_that_backtracks_for_ever_gets_its_verdict():
    """The time limit is the answer for what the completion alone decides, without a retry."""
    pauses: list[float] = []
    form = RewardPart(name="format", time_limit_s=0.5, options={"pattern": "(a+)+b"})
    with scorer(form, pauses=pauses) as made:
        assert made.score([sample("a" * 60), sample("aab")]) == [
            Score(reward=0.0, parts={"format": 0.0}),
            Score(reward=1.0, parts={"format": 1.0}),
        ]
    assert pauses == []


MATHS = [
    (r"The answer is \boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"$x = \frac{2}{4}$", r"\frac12", 1.0),
    ("0.333333", r"\frac{1}{3}", 1.0),
    (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1.0),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
    (r"\boxed{3} but no, \boxed{4}", "4", 1.0),
    (r"\boxed{(1,2)}", "(2,1)", 0.0),
    ("seven", "7", 0.0),
    ("", "7", 0.0),
    (r"\boxed{9^{9^{9^{9}}}}", "7", 0.0),
]


def test_math_knows_equal_answers_and_survives_what_sympy_does_not():
    """LaTeX, decimals, sets, polynomials; a tower of powers gets 0 within the limit. A reference that is no
    expression is a failure."""
    pytest.importorskip("math_verify")
    MathEquivalence().check()
    with scorer(RewardPart(name="math", time_limit_s=5.0)) as made:
        scores = made.score([sample(text, reference) for text, reference, _ in MATHS])
        assert [(score.reward, score.error) for score in scores] == [(reward, "") for _, _, reward in MATHS]
        (score,) = made.score([sample("7", "")])
    assert score.error == "math: reference_answer: must be an expression, got ''"


def test_worker_that_cannot_load_its_reward_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module that this process has, and the worker does not."""
    (tmp_path / "only_here.py").write_text("def score(sample):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with scorer(RewardPart(name="only_here:score"), retries=0) as made:
        (score,) = made.score([sample("x")])
    assert score.error == (
        "score: must not end its process, got a start that failed: WiringError: reward: module of 'only_here:score' "
        "must be importable, got No module named 'only_here'"
    )


OWNER = """
import sys, time
from tests.kit.rewards import sample, scorer
from relax.rewards.config import RewardPart
made = scorer(RewardPart(name="bad_rewards:hangs", time_limit_s=600.0))
made.score([sample("a")])
print(made.worker_pids()[0], flush=True)
made.score([sample("hang")])
"""


def test_workers_die_with_a_service_that_is_killed():
    """Also one that is in the middle of an attempt."""
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as owner:
        worker = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    assert psutil.wait_procs([worker], timeout=DEADLINE_S)[1] == []


def test_text_that_cannot_be_sent_is_a_row_error():
    """A lone surrogate is no text; the worker goes on."""
    with scorer(bad("length"), retries=0) as made:
        broken, whole = made.score([sample("\ud800"), sample("ab")])
    assert broken.error.startswith("length: must have a worker, got UnicodeEncodeError: ")
    assert whole.reward == 2.0


def test_long_scoring_beats():
    """Whoever holds a lease hears of the time that passes."""
    beats: list[int] = []
    with scorer(bad("hangs", time_limit_s=0.5), retries=0) as made:
        made.score([sample("hang")], beat=lambda: beats.append(1), beat_s=0.05)
    assert beats
