"""Training batches: what is refused, and how sequences and micro-batches are cut."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from relax.errors import TrainingError
from relax.train.batch import (
    CutRules,
    RoutingShape,
    TrainBatch,
    check_batch,
    plan_micro_batches,
    prompt_routes,
)

ROUTING = RoutingShape(num_layers=2, top_k=2, num_experts=5)


def changed(batch: TrainBatch, name: str, row: int, value) -> TrainBatch:
    """Return the batch with one row's value replaced."""
    values = list(getattr(batch, name))
    values[row] = value
    if name in ("groups", "rewards"):
        values = np.array(values)
    return dataclasses.replace(batch, **{name: values})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("groups", 9, "batch row 2: group must be in [0, 4), got 9"),
        ("completion_token_ids", np.zeros(0, np.int32), "must hold at least one token, got none"),
        ("completion_token_ids", np.array([1, 512]), "completion_token_ids must be in [0, 512), got 512"),
        ("rollout_logprobs", np.zeros(9, np.float32), "must be one for each of"),
        ("rewards", float("nan"), "batch row 2: reward must be finite, got nan"),
        ("routed_experts", None, "must be there for routing replay, got none; let the rollout report them"),
        ("routed_experts", np.zeros((3, 2, 2), np.uint8), "routed_experts must be ["),
    ],
)
def test_check_batch_names_the_row_and_the_rule(make_batch, name, value, message) -> None:
    """Each broken rule is refused with the row, the rule and the value."""
    batch = changed(make_batch(routed=True), name, 2, value)
    with pytest.raises(TrainingError) as caught:
        check_batch(batch, 512, ROUTING)
    assert str(caught.value).startswith("batch row 2: ")
    assert message in str(caught.value)


def test_check_batch_refuses_infinite_logprobs_and_unknown_experts(make_batch) -> None:
    """Infinities and experts that the model does not have are refused too."""
    batch = make_batch(routed=True)
    batch.rollout_logprobs[0][-1] = -np.inf
    with pytest.raises(
        TrainingError, match=r"batch row 0: rollout_logprobs must be finite, got -inf at token \d"
    ):
        check_batch(batch, 512, ROUTING)
    batch = make_batch(routed=True)
    batch.routed_experts[1][0, 0, 0] = 5
    with pytest.raises(TrainingError, match=r"batch row 1: routed_experts must be in \[0, 5\), got 0 to 5"):
        check_batch(batch, 512, ROUTING)


def test_check_batch_refuses_lists_of_different_lengths(make_batch) -> None:
    """A missing row is named by its list."""
    batch = make_batch()
    with pytest.raises(TrainingError, match="batch: rewards must have 12 rows, got 11"):
        check_batch(dataclasses.replace(batch, rewards=batch.rewards[:-1]), 512, None)
    empty = TrainBatch(
        prompts=[],
        groups=np.zeros(0, np.int32),
        completion_token_ids=[],
        rollout_logprobs=[],
        routed_experts=[],
        rewards=np.zeros(0, np.float32),
    )
    with pytest.raises(TrainingError, match="must have at least one row, got none"):
        check_batch(empty, 512, None)


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 60, 10_000])
def test_plan_predicts_every_token_once(make_batch, share_prompts, max_tokens) -> None:
    """Whatever the cutting, each completion token is predicted exactly once, from the token before it."""
    batch = make_batch(routed=True)
    micros = plan_micro_batches(
        batch, CutRules(max_tokens=max_tokens, share_prompts=share_prompts, routing=ROUTING)
    )
    targets = np.sort(np.concatenate([micro.target_N for micro in micros]))
    np.testing.assert_array_equal(targets, np.arange(sum(map(len, batch.completion_token_ids))))
    for micro in micros:
        assert micro.segment_BT.size <= max_tokens or len(micro.segment_BT) == 1
        flat = np.where(micro.prompt_place_BT >= 0, -1, micro.completion_place_BT).T.flatten()
        before = flat[micro.predictor_N]
        inside = before >= 0
        np.testing.assert_array_equal(before[inside], micro.target_N[inside] - 1)
        assert micro.num_branches <= 1 or share_prompts


def test_plan_shares_a_prompt_only_among_rows_routed_alike(make_batch) -> None:
    """A row whose prompt took other experts gets a sequence of its own."""
    batch = make_batch(num_groups=1, group_size=3, routed=True)
    batch.routed_experts[1][0, 0] = batch.routed_experts[1][0, 0][::-1]
    (micro,) = plan_micro_batches(batch, CutRules(max_tokens=10_000, routing=ROUTING))
    assert len(micro.segment_BT) > 1
    (micro,) = plan_micro_batches(batch, CutRules(max_tokens=10_000))
    assert len(micro.segment_BT) == 1


def test_plan_follows_the_routes_of_all_stages_where_they_are_given(make_batch) -> None:
    """Two stages of which one sees a difference cut alike, whatever a stage's own layers say."""
    batch = make_batch(num_groups=1, group_size=3, routed=True)
    unlike = make_batch(num_groups=1, group_size=3, routed=True)
    unlike.routed_experts[1][0, 0] = unlike.routed_experts[1][0, 0][::-1]
    routes = np.stack([prompt_routes(batch), prompt_routes(unlike)], axis=1)
    rules = CutRules(max_tokens=10_000, routing=ROUTING)
    plans = [plan_micro_batches(each, rules, routes) for each in (batch, unlike)]
    (first,), (second,) = plans
    assert len(first.segment_BT) == 3
    assert (first.segment_BT == second.segment_BT).all()
    assert len(plan_micro_batches(batch, rules)[0].segment_BT) == 1


def test_plan_puts_distinct_experts_into_padding(make_batch) -> None:
    """Dispatchers count on it."""
    batch = make_batch(routed=True)
    (micro,) = plan_micro_batches(batch, CutRules(max_tokens=10_000, routing=ROUTING))
    padding = micro.experts_BTLK[micro.segment_BT < 0]
    assert len(padding)
    assert (padding == np.arange(2)).all()


@pytest.mark.parametrize("share_prompts", [True, False])
def test_packing_leaves_no_padding_but_at_the_end(make_batch, share_prompts) -> None:
    """Sequences follow one another, within the budget, and the same tokens are predicted."""
    batch = make_batch()
    rules = CutRules(max_tokens=90, share_prompts=share_prompts, packing=True, multiple=4)
    micros = plan_micro_batches(batch, rules)
    targets = np.sort(np.concatenate([micro.target_N for micro in micros]))
    np.testing.assert_array_equal(targets, np.arange(sum(map(len, batch.completion_token_ids))))
    assert len(micros) > 1
    for micro in micros:
        assert micro.segment_BT.shape[0] == 1
        length = micro.segment_BT.shape[1]
        assert length % 4 == 0
        assert length <= 90 or len(micro.bounds) <= 3  # a longer sequence goes alone
        assert (micro.bounds[0], micro.bounds[-1]) == (0, length)
        padding = np.flatnonzero(micro.segment_BT[0] < 0)
        assert padding.tolist() == list(range(length - len(padding), length))
        assert len(padding) < 4


def test_plan_trains_the_rows_of_this_rank_alone(make_batch) -> None:
    """Other rows are known, for the loss's sums, but run through no model."""
    batch = dataclasses.replace(make_batch(), rows=np.array([3, 4, 5]))
    assert batch.own_prompt_numbers.tolist() == [1]
    (micro,) = plan_micro_batches(batch, CutRules(max_tokens=10_000))
    starts = np.cumsum([0, *map(len, batch.completion_token_ids)])
    assert sorted(micro.target_N.tolist()) == list(range(starts[3], starts[6]))
    assert micro.prompt_place_BT.max() < len(batch.prompts[1].token_ids)
