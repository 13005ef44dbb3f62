"""Which groups of completions can be trained on."""

from __future__ import annotations

import math

import numpy as np
import pytest

from relax.roles.answers import check_group, enough_of
from relax.rollout.engine import Completion


def completion(index: int = 0, num_tokens: int = 2, **changes) -> Completion:
    values = {
        "uid": "0-0",
        "sample_index": index,
        "token_ids": np.arange(num_tokens, dtype=np.int32),
        "logprobs": np.full(num_tokens, -1.0, np.float32),
        "token_policy_versions": np.zeros(num_tokens, np.int32),
        "routed_experts": None,
        "finish_reason": "stop",
        "text": "red",
    }
    return Completion(**values | changes)


def test_check_group_accepts_a_whole_group():
    """Nothing is said."""
    assert check_group([completion(0), completion(1, num_tokens=5)], 2) == ""


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        ([completion(0)], "group: must have 2 completions, got 1"),
        ([], "group: must have 2 completions, got 0"),
        (
            [completion(0), completion(1, logprobs=np.array([0.0, math.nan], np.float32))],
            "completion 1: logprobs must be finite, got [0.0, nan]",
        ),
        (
            [completion(0, num_tokens=0), completion(1)],
            "completion 0: must hold at least one token, got none",
        ),
        (
            [completion(0, token_policy_versions=np.zeros(1, np.int32)), completion(1)],
            "completion 0: every token must have a logprob and a policy version, got 2 tokens, 2 logprobs, "
            "1 policy versions",
        ),
        (
            [completion(0, finish_reason="refused", error="prompt must fit, got 9 tokens")],
            "completion 0: refused by the engine: prompt must fit, got 9 tokens",
        ),
    ],
)
def test_check_group_says_what_is_wrong(group, reason):
    """The first fault, with the sample it is in."""
    assert check_group(group, 2) == reason


def test_enough_of_a_group_are_those_that_have_finished():
    """Numbered anew, so that a prompt that is answered twice gives the same uids; the rest is left over."""
    group = [
        completion(0, finish_reason="abort"),
        completion(1),
        completion(2, finish_reason="length"),
        completion(3),
    ]
    chosen, rest = enough_of(group, 2)
    assert [(each.sample_index, each.finish_reason) for each in chosen] == [(0, "stop"), (1, "length")]
    assert [each.sample_index for each in rest] == [0, 3]


@pytest.mark.parametrize("reasons", [("abort", "stop", "abort"), ("stop", "stop"), ("refused",)])
def test_group_that_has_not_enough_or_no_more_comes_back_as_it_is(reasons):
    """It is for others to say what becomes of it."""
    group = [completion(index, finish_reason=reason) for index, reason in enumerate(reasons)]
    chosen, rest = enough_of(group, 2)
    assert chosen is group
    assert rest == []
