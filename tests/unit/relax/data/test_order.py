"""The order of prompts: weights, epochs, shares of workers, and going on from a position."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.data.errors import PositionError
from relax.data.mixing import MAX_PERIOD, Mixture, whole_shares
from relax.data.order import PromptOrder, SourceSize

SIZES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=4).map(
    lambda pairs: [SourceSize(f"s{at}", rows, weight) for at, (rows, weight) in enumerate(pairs)]
)
SEEDS = st.integers(0, 2**32 - 1)


@given(SIZES, SEEDS, st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_row_comes_once_an_epoch(sizes: list[SourceSize], seed: int, shuffle: bool) -> None:
    """Whatever the mixture, the draws of a source in one epoch are its rows, each once, epochs one after another."""
    draws = list(islice(PromptOrder(sizes, seed=seed, shuffle=shuffle), 400))
    for at, size in enumerate(sizes):
        own = [draw for draw in draws if draw.source == at]
        assert [draw.epoch for draw in own] == [each // size.num_rows for each in range(len(own))]
        for start in range(0, len(own) - size.num_rows + 1, size.num_rows):
            rows = [draw.row for draw in own[start : start + size.num_rows]]
            assert sorted(rows) == list(range(size.num_rows))
            assert shuffle or rows == sorted(rows)


@given(SIZES, SEEDS, st.integers(0, 300))
@settings(max_examples=40, deadline=None)
def test_order_goes_on_from_any_position(sizes: list[SourceSize], seed: int, num_drawn: int) -> None:
    """Position to JSON and back: the rest equals what would have come without the break."""
    whole = list(islice(PromptOrder(sizes, seed=seed), num_drawn + 50))
    order = PromptOrder(sizes, seed=seed)
    first = list(islice(order, num_drawn))
    saved = json.loads(json.dumps(order.position()))
    assert first + list(islice(PromptOrder.from_position(saved, sizes, seed=seed), 50)) == whole


@given(SIZES, SEEDS, st.integers(0, 1_000_000))
@settings(max_examples=40, deadline=None)
def test_draw_is_a_function_of_its_number(sizes: list[SourceSize], seed: int, number: int) -> None:
    """Far ahead, without the draws before, and after others were asked for."""
    order = PromptOrder(sizes, seed=seed)
    far = order.draw(number)
    order.draw(0)
    assert order.draw(number) == far == PromptOrder(sizes, seed=seed).draw(number)


@given(SIZES, SEEDS, st.integers(1, 5), st.integers(0, 40))
@settings(max_examples=30, deadline=None)
def test_workers_share_one_order(sizes: list[SourceSize], seed: int, num_workers: int, cut: int) -> None:
    """Together they draw what one would, also from a position that another worker left."""
    alone = list(islice(PromptOrder(sizes, seed=seed), cut + 60))
    position = {**PromptOrder(sizes, seed=seed).position(), "next": cut}
    workers = [
        PromptOrder.from_position(position, sizes, seed=seed, share=(each, num_workers))
        for each in range(num_workers)
    ]
    drawn = sorted(draw for worker in workers for draw in islice(worker, 60 // num_workers))
    assert drawn == alone[cut : cut + len(drawn)]


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=6), SEEDS)
@settings(max_examples=60, deadline=None)
def test_mixture_respects_the_weights(weights: list[float], seed: int) -> None:
    """In a period every source has its share exactly, and the share is its weight to one part in MAX_PERIOD."""
    total = sum(weights)
    if min(weights) / total < 2 / MAX_PERIOD:
        return
    mixture = Mixture(weights, seed)
    period = mixture.period
    picks = [mixture.pick(number) for number in range(period, 2 * period)]
    counts = Counter(pick.source for pick in picks)
    for source, weight in enumerate(weights):
        assert counts[source] == mixture.shares[source]
        assert abs(counts[source] / period - weight / total) <= 1 / MAX_PERIOD + 1e-9
        before = [pick.num_before for pick in picks if pick.source == source]
        assert before == list(range(mixture.shares[source], 2 * mixture.shares[source]))


@pytest.mark.parametrize(
    ("weights", "shares"),
    [([1], (1,)), ([0.7, 0.2, 0.1], (7, 2, 1)), ([2, 2], (1, 1)), ([5, 0.5], (9091, 909))],
)
def test_shares_are_the_smallest_whole_numbers(weights: list[float], shares: tuple[int, ...]) -> None:
    """A short period where the weights allow one."""
    assert whole_shares(weights) == shares


@pytest.mark.parametrize("weights", [[], [0.0, 1.0], [-1.0], [float("nan")], [1.0, 1e-9]])
def test_weights_that_cannot_be_kept_are_refused(weights: list[float]) -> None:
    """None, not above 0, or too small to come at all."""
    with pytest.raises(ValueError, match=r"^weights: must"):
        whole_shares(weights)


def test_one_source_has_the_permutation_of_seed_and_epoch() -> None:
    """The order that a run with one source has, by numpy's generator."""
    order = PromptOrder([SourceSize("train", 7)], seed=3)
    assert [draw.row for draw in islice(order, 14)] == [
        *np.random.default_rng([3, 0]).permutation(7).tolist(),
        *np.random.default_rng([3, 1]).permutation(7).tolist(),
    ]


@pytest.mark.parametrize(
    ("changed", "seed", "shuffle"),
    [
        ([SourceSize("a", 4), SourceSize("b", 3)], 1, True),
        ([SourceSize("a", 4), SourceSize("b", 3)], 0, False),
        ([SourceSize("a", 5), SourceSize("b", 3)], 0, True),
        ([SourceSize("a", 4), SourceSize("c", 3)], 0, True),
        ([SourceSize("a", 4), SourceSize("b", 3, 2.0)], 0, True),
    ],
)
def test_position_of_another_order_is_refused(changed: list[SourceSize], seed: int, shuffle: bool) -> None:
    """Another seed, shuffling, size, name or weight would silently give other prompts."""
    position = PromptOrder([SourceSize("a", 4), SourceSize("b", 3)], seed=0).position()
    with pytest.raises(PositionError, match=r"^position: must be of this order"):
        PromptOrder.from_position(position, changed, seed=seed, shuffle=shuffle)


@pytest.mark.parametrize("position", [{}, {"next": -1}, {"next": "7"}, {"next": True}])
def test_position_that_is_none_is_refused(position: dict) -> None:
    """With the value."""
    with pytest.raises(PositionError, match=r"^position: next must be a number from 0, got "):
        PromptOrder.from_position(position, [SourceSize("a", 4)], seed=0)


def test_order_of_an_empty_source_is_refused() -> None:
    """By its name."""
    with pytest.raises(ValueError, match=r"got none in \['b'\]"):
        PromptOrder([SourceSize("a", 4), SourceSize("b", 0)], seed=0)
