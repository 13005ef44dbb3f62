"""The weighted sum of inline parts, pauses between attempts, and what a failure costs a group."""

from __future__ import annotations

import math
import random

import numpy as np

from relax.rewards.attempt import MAX_REASON_CHARS, attempt, failed, longest_pause_s, pause_s
from relax.rewards.base import BoundedReward, Reward, RewardFailedError
from relax.rewards.config import RewardConfig, RewardPart
from relax.rewards.scorer import Score
from relax.roles.answers import Answers, score_columns, with_scores
from relax.rollout.engine import Completion
from tests.kit.rewards import sample, scorer

SUM = (RewardPart(name="exact_match", weight=0.75), RewardPart(name="fuzzy_match", label="near", weight=-2.0))


def test_scorer_adds_up_its_parts():
    """By their weights; each part is kept without its own."""
    with scorer(*SUM) as made:
        assert made.worker_pids() == []
        assert made.score([sample("red"), sample("rad", "red"), sample("", "red")]) == [
            Score(reward=-1.25, parts={"exact_match": 1.0, "near": 1.0}),
            Score(reward=-2 * (1 - 1 / 3), parts={"exact_match": 0.0, "near": 1 - 1 / 3}),
            Score(reward=0.0, parts={"exact_match": 0.0, "near": 0.0}),
        ]
        assert made.score([]) == []


def test_scorer_says_which_part_failed():
    """The other parts are kept, the sum is not used."""
    with scorer(RewardPart(name="multiple_choice"), RewardPart(name="exact_match")) as made:
        (score,) = made.score([sample("red")])
    assert score == Score(
        reward=0.0,
        parts={"multiple_choice": None, "exact_match": 1.0},
        error="multiple_choice: reference_answer: must be one of the letters ABCDEFGH, got 'red'",
    )


def test_scorer_refuses_a_sum_that_is_not_finite():
    """Weights can be too large."""
    for weight, told in ((1.7e308, "inf"), (2e38, "4e+38")):
        huge = [RewardPart(name=name, weight=weight) for name in ("exact_match", "fuzzy_match")]
        with scorer(*huge) as made:
            (score,) = made.score([sample("red")])
        assert (score.reward, score.error) == (0.0, f"the weighted sum must be finite in 32 bits, got {told}")


def test_pauses_grow_up_to_a_bound_and_vary():
    """Half a second, doubled each time, ten at most."""
    assert [longest_pause_s(number) for number in (1, 2, 3, 9)] == [0.5, 1.0, 2.0, 10.0]
    chance = random.Random(0)
    drawn = [pause_s(3, chance) for _ in range(200)]
    assert 0 <= min(drawn) < 0.5 < 1.5 < max(drawn) <= 2.0


class _Flaky(Reward):
    def __call__(self, sample):
        raise RewardFailedError("busy\nand   more", retry=sample.completion_text == "again")


class _Sure(_Flaky):
    deterministic = True


class _Slow(BoundedReward):
    def bounded(self, sample, time_limit_s):
        return time_limit_s


def test_attempt_says_whether_to_try_again():
    """As the failure says, but never for what is the same each time."""
    again, never = sample("again"), sample("never")
    assert [attempt(_Flaky(), each, 1.0).retry for each in (again, never)] == [True, False]
    assert attempt(_Sure(), again, 1.0).retry is False
    assert attempt(_Flaky(), again, 1.0).error == "busy and more"
    assert attempt(_Slow(), again, 7.5).reward == 7.5
    assert len(failed("x" * 9999, retry=True).error) == MAX_REASON_CHARS + 1


def completions(uid: str) -> list[Completion]:
    """Return a group of two."""
    return [
        Completion(
            uid=uid,
            sample_index=index,
            token_ids=np.array([1], np.int32),
            logprobs=np.zeros(1, np.float32),
            token_policy_versions=np.zeros(1, np.int32),
            routed_experts=None,
            finish_reason="stop",
            text="red",
        )
        for index in range(2)
    ]


GOOD, BAD = (
    Score(reward=1.0, parts={"exact_match": 1.0}),
    Score(reward=0.0, parts={"exact_match": None}, error="exact_match: too hot"),
)


def settled(config: RewardConfig) -> Answers:
    """Settle three groups: a good one, one with one failure, one of failures alone; prompt 1 had failed before."""
    answers = Answers(
        rows=[0, 2, 3], groups=[completions("a"), completions("c"), completions("d")], failed={"b": "early"}
    )
    return with_scores(answers, [GOOD, GOOD, GOOD, BAD, BAD, BAD], ["a", "b", "c", "d"], config)


def test_failure_costs_its_group_by_default():
    """Under the prompt's name, with the completion and the reason."""
    answers = settled(RewardConfig())
    assert answers.rows == [0]
    assert answers.failed == {
        "b": "early",
        "c": "completion 1: reward failed: exact_match: too hot",
        "d": "completion 0: reward failed: exact_match: too hot",
    }
    assert answers.scores == [GOOD, GOOD]


def test_failure_can_cost_its_row_alone():
    """The row gets the configured value and the reason; a group without any reward is dropped all the same."""
    config = RewardConfig(on_failure="use_value", failed_reward=-0.5)
    answers = settled(config)
    assert answers.rows == [0, 2]
    assert sorted(answers.failed) == ["b", "d"]
    assert [score.reward for score in answers.scores] == [1.0, 1.0, 1.0, -0.5]
    columns = {name: array.to_pylist() for name, array in score_columns(answers.scores, config).items()}
    assert columns == {
        "reward_exact_match": [1.0, 1.0, 1.0, None],
        "reward_error": [None, None, None, "exact_match: too hot"],
    }
    assert not any(math.isnan(score.reward) for score in answers.scores)
