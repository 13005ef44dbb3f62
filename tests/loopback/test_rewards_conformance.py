"""The checks for rewards of the user's, on good ones and on bad ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from relax.errors import WiringError
from relax.rewards.config import RewardPart
from relax.rewards.conformance import check_reward, find_problems, main
from tests.kit.job import PLUGINS
from tests.kit.rewards import sample


@pytest.fixture(autouse=True)
def plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit's plug-ins can be imported here and in workers."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGINS), os.environ.get("PYTHONPATH", "")]))


def test_conformance_accepts_a_good_reward():
    """Rewards as expected, odd completions scored."""
    check_reward(RewardPart(name="bad_rewards:length"), [(sample("four"), 4.0), (sample("x"), None)])
    check_reward(RewardPart(name="exact_match"), [(sample("red"), 1.0)])


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (RewardPart(name="bad_rewards:length"), "sample 0: the reward must be 1, got 4"),
        (RewardPart(name="bad_rewards:fails"), "sample 0: must be scored, got fails: KeyError: 'colour'"),
        (
            RewardPart(name="bad_rewards:Counting"),
            "sample 0: the reward must be 1, got 1",
        ),
        (
            RewardPart(name="bad_rewards:missing"),
            "reward: 'bad_rewards:missing' must name a function, bad_rewards has",
        ),
    ],
)
def test_conformance_names_what_is_wrong(part: RewardPart, problem: str):
    """The first of the problems."""
    problems = find_problems(part, [(sample("four"), 1.0)])
    if part.name.endswith("Counting"):
        # Its first answer is the expected one, its second is not: it promises to be the same each time.
        assert problems == ["sample 0: the reward must be the same each time, got 1 and 2"]
    else:
        assert problems[0].startswith(problem)
        with pytest.raises(WiringError, match=r"^reward 'bad_rewards:"):
            check_reward(part, [(sample("four"), 1.0)])


def test_conformance_runs_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """0 for a good reward, 1 with the problems, 2 for samples that are none."""
    samples = tmp_path / "samples.jsonl"
    rows = [{"completion_text": "ab", "reference_answer": "", "expected": 1.0}]
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["bad_rewards:length", str(samples), "--options", '{"scale": 0.5}']) == 0
    assert capsys.readouterr().out == "bad_rewards:length: keeps its promises (1 samples)\n"
    assert main(["bad_rewards:length", str(samples)]) == 1
    assert capsys.readouterr().out == "bad_rewards:length: sample 0: the reward must be 1, got 2\n"
    samples.write_text('{"completion": "ab"}\n')
    assert main(["bad_rewards:length", str(samples)]) == 2
    assert f"{samples}:1: must be a sample as JSON, got " in capsys.readouterr().err
