"""Rewards: text equality, plug-ins by name, and failures that stay with their row."""

from __future__ import annotations

import sys
import types

import pytest

from relax.errors import WiringError
from relax.rollout.rewards import RewardInput, RewardResult, load_reward


def _sample(completion: str, reference: str = "red", finish_reason: str = "stop") -> RewardInput:
    return RewardInput(
        prompt_text="What colour?",
        completion_text=completion,
        reference_answer=reference,
        finish_reason=finish_reason,
    )


@pytest.fixture
def plug_in(monkeypatch):
    """A module of plug-ins that only this test can import."""
    module = types.ModuleType("my_rewards")
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    return module


@pytest.mark.parametrize(
    ("completion", "reference", "reward"),
    [
        ("red", "red", 1.0),
        ("  Red\n", "red", 1.0),
        ("dark  red", "Dark red", 1.0),
        ("ＲＥＤ", "red", 1.0),  # full-width letters
        ("reddish", "red", 0.0),
        ("", "red", 0.0),
    ],
)
def test_exact_match_compares_normalised_text(completion, reference, reward):
    """Case, white space and Unicode forms do not matter, anything else does."""
    assert load_reward("exact_match")(_sample(completion, reference)) == RewardResult(reward=reward)


def test_exact_match_wants_an_answer_that_ended():
    """The right words without an end token are not an answer."""
    assert load_reward("exact_match")(_sample("red", finish_reason="length")).reward == 0.0


def test_load_reward_takes_plug_ins(plug_in):
    """A function may return a number or a result of its own."""
    plug_in.length = lambda sample: len(sample.completion_text)
    plug_in.judged = lambda sample: RewardResult(reward=0.0, error="the judge did not answer")
    assert load_reward("my_rewards:length")(_sample("abc")) == RewardResult(reward=3.0)
    assert load_reward("my_rewards:judged")(_sample("abc")).error == "the judge did not answer"


def test_load_reward_turns_failures_into_row_errors(plug_in):
    """An exception, a non-number and a non-finite number mark the row."""

    def fails(sample):
        raise KeyError("colour")

    plug_in.fails = fails
    plug_in.words = lambda sample: "good"
    plug_in.infinite = lambda sample: float("inf")
    plug_in.nan = lambda sample: RewardResult(reward=float("nan"))
    errors = {
        name: load_reward(f"my_rewards:{name}")(_sample("x")).error
        for name in vars(plug_in)
        if name[0] != "_"
    }
    assert errors == {
        "fails": "my_rewards:fails: KeyError: 'colour'",
        "words": "my_rewards:words: ValueError: could not convert string to float: 'good'",
        "infinite": "my_rewards:infinite: the reward must be finite, got inf",
        "nan": "my_rewards:nan: the reward must be finite, got nan",
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact", r"must be one of \['exact_match'\] or 'package.module:function', got 'exact'"),
        ("no_such_module_here:f", "module of 'no_such_module_here:f' must be importable"),
        ("my_rewards:nothing", r"'my_rewards:nothing' must name a function, my_rewards has \['length'\]"),
    ],
)
def test_load_reward_refuses_unknown_names(plug_in, name, message):
    """What cannot be found fails at start, with the choices."""
    plug_in.length = lambda sample: 0.0
    with pytest.raises(WiringError, match=message):
        load_reward(name)
