"""What a run may say about its reward, in its short and its long form."""

from __future__ import annotations

import pytest

from relax.config import load_config, save_config
from relax.errors import ConfigError
from relax.rewards.config import RewardConfig, RewardPart

LONG = """
rollout:
  reward:
    parts:
      - {name: exact_match, weight: 0.9}
      - {name: "my_rewards:form", weight: 0.1, time_limit_s: 3, options: {tags: [a, b], deep: {x: 1}}}
    retries: 5
"""


def test_reward_config_reads_parts_with_their_options(tmp_path):
    """As plain values, and again from what a run saves."""
    file = tmp_path / "job.yaml"
    file.write_text(LONG)
    config = load_config([file])
    reward = config.rollout.reward
    assert reward.parts == [
        RewardPart(name="exact_match", weight=0.9),
        RewardPart(
            name="my_rewards:form",
            weight=0.1,
            time_limit_s=3.0,
            options={"tags": ["a", "b"], "deep": {"x": 1}},
        ),
    ]
    assert reward.labels == ["exact_match", "form"]
    assert [part.column for part in reward.parts] == ["reward_exact_match", "reward_form"]
    assert [reward.limit_s(part) for part in reward.parts] == [10.0, 3.0]
    save_config(config, tmp_path / "config.yaml")
    assert load_config([tmp_path / "config.yaml"]) == config


def test_reward_by_name_is_one_part(tmp_path):
    """In a file or as a word; other settings stay, the parts before it do not."""
    file = tmp_path / "job.yaml"
    file.write_text("rollout: {reward: my_rewards:half}")
    assert load_config([file]).rollout.reward == RewardConfig(parts=[RewardPart(name="my_rewards:half")])
    file.write_text(LONG)
    reward = load_config([file], ["rollout.reward=multiple_choice"]).rollout.reward
    assert (reward.labels, reward.retries) == (["multiple_choice"], 5)


def test_reward_parts_on_the_command_line(tmp_path):
    """A list replaces the whole list."""
    word = "rollout.reward.parts=[{name: math, weight: 2}, {name: format, weight: 0, options: {tags: [a]}}]"
    parts = load_config([], [word]).rollout.reward.parts
    assert [(part.name, part.weight, part.options) for part in parts] == [
        ("math", 2.0, {}),
        ("format", 0.0, {"tags": ["a"]}),
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: RewardConfig(parts=[RewardPart(name="a:f"), RewardPart(name="b:f")]),
            "rollout.reward.parts: labels must differ, got ['f', 'f']; give one of them a label of its own",
        ),
        (
            lambda: RewardConfig(parts=[RewardPart(name="math", weight=0.0)]),
            "rollout.reward.parts: must hold a part with a weight other than 0, got 1 without",
        ),
        (
            lambda: RewardPart(name="math", label="error"),
            "rollout.reward.parts: label must be letters, digits and '_' and not 'error', got 'error'",
        ),
        (
            lambda: RewardPart(name="my-rewards"),
            "rollout.reward.parts: label must be letters, digits and '_' and not 'error', got 'my-rewards'",
        ),
        (
            lambda: RewardPart(name="math", weight=float("nan")),
            "rollout.reward.parts: weight of math must be finite, got nan",
        ),
        (
            lambda: RewardPart(name="math", time_limit_s=0.0),
            "rollout.reward.parts: time_limit_s of math must be above 0, got 0.0",
        ),
        (lambda: RewardConfig(time_limit_s=0.0), "rollout.reward.time_limit_s: must be above 0, got 0.0"),
        (lambda: RewardConfig(workers=0), "rollout.reward.workers: must be at least 1, got 0"),
        (
            lambda: RewardConfig(failed_reward=float("inf")),
            "rollout.reward.failed_reward: must be finite, got inf",
        ),
    ],
)
def test_reward_config_refuses_what_cannot_be(make, message):
    """With the key, the rule and the value."""
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == message
