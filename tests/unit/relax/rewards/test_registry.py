"""Rewards by name, by path and by entry point; options are checked at the start."""

from __future__ import annotations

import sys
import types
from importlib.metadata import EntryPoint

import pytest

from relax.errors import WiringError
from relax.rewards import registry
from relax.rewards.base import RewardResult
from relax.rewards.config import RewardPart
from relax.rewards.exact_match import ExactMatch
from relax.rewards.registry import BUILT_IN, load_reward
from tests.kit.rewards import sample

NAMES = (
    "['code', 'exact_match', 'format', 'fuzzy_match', 'generative', 'http', 'math', 'multiple_choice'] "
    "or 'package.module:function'"
)
NEEDED = {"format": {"tags": ["a"]}, "http": {"url": "http://a:1"}, "generative": {"url": "http://a:1/v1"}}


@pytest.fixture
def plug_in(monkeypatch):
    """A module of plug-ins that only this test can import."""
    module = types.ModuleType("my_plug_ins")
    monkeypatch.setitem(sys.modules, "my_plug_ins", module)
    return module


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_reward_of_ours_loads_by_name(name):
    """With the options that it cannot do without."""
    reward = load_reward(RewardPart(name=name, options=NEEDED.get(name, {})))
    assert type(reward).__module__ == BUILT_IN[name].partition(":")[0]


def test_load_reward_takes_functions_and_classes(plug_in):
    """A function gets the options with the sample, a class before it; both run in a worker process."""
    plug_in.length = lambda sample, scale=1.0: scale * len(sample.completion_text)
    plug_in.judged = lambda sample: RewardResult(reward=0.0, error="the judge did not answer")

    class Constant:
        def __init__(self, value):
            self.value = value

        def __call__(self, sample):
            return self.value

    plug_in.Constant = Constant
    scaled = load_reward(RewardPart(name="my_plug_ins:length", options={"scale": 2.0}))
    assert (scaled(sample("abc")), scaled.place) == (6.0, "process")
    assert (
        load_reward(RewardPart(name="my_plug_ins:judged"))(sample("abc")).error == "the judge did not answer"
    )
    assert load_reward(RewardPart(name="my_plug_ins:Constant", options={"value": 0.25}))(sample("")) == 0.25


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("judge", {}, f"reward: must be one of {NAMES}, got 'judge'"),
        ("exact_mach", {}, f"reward: must be one of {NAMES}, got 'exact_mach'; did you mean 'exact_match'?"),
        (
            "no_such_module_here:f",
            {},
            "reward: module of 'no_such_module_here:f' must be importable, got No module named 'no_such_module_here'",
        ),
        (
            "my_plug_ins:nothing",
            {},
            "reward: 'my_plug_ins:nothing' must name a function, my_plug_ins has ['length']",
        ),
        (
            "fuzzy_match",
            {"treshold": 0.5},
            "reward: options of 'fuzzy_match' must be of ['by', 'threshold', 'extract'], "
            "got ['treshold']; did you mean 'threshold'?",
        ),
        (
            "fuzzy_match",
            {"threshold": "half"},
            "reward: options of 'fuzzy_match': Expected `float`, got `str` - at `$.threshold`",
        ),
        (
            "format",
            {},
            "reward: options of 'format': format: must have either tags or a pattern, got both or neither",
        ),
        (
            "exact_match",
            {"extract": "a"},
            "reward: options of 'exact_match': extract: must have 1 group(s), got 0 in 'a'",
        ),
        (
            "my_plug_ins:length",
            {"scael": 2},
            "reward: options of 'my_plug_ins:length' must be of ['scale'], "
            "got ['scael']; did you mean 'scale'?",
        ),
        (
            "http",
            {"url": "ftp://a"},
            "reward: options of 'http': url: must be http://host:port/path or https, got 'ftp://a'",
        ),
    ],
)
def test_load_reward_refuses_what_cannot_be(plug_in, name, options, message):
    """What cannot be found or does not take the options fails at start, with the choices."""
    plug_in.length = lambda sample, scale=1.0: 0.0
    with pytest.raises(WiringError) as caught:
        load_reward(RewardPart(name=name, options=options))
    assert str(caught.value) == message


def test_load_reward_finds_entry_points_but_lets_none_replace_ours(monkeypatch):
    """A package offers a reward under a name of its own."""
    points = [
        EntryPoint("near", "relax.rewards.fuzzy_match:FuzzyMatch", registry.ENTRY_POINT_GROUP),
        EntryPoint("exact_match", "relax.rewards.fuzzy_match:FuzzyMatch", registry.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert load_reward(RewardPart(name="near"))(sample("rad")) == pytest.approx(2 / 3)
    assert isinstance(load_reward(RewardPart(name="exact_match")), ExactMatch)
