"""Splits over ranks and micro-batches, for any sizes."""

from __future__ import annotations

import sys
from types import FrameType

from hypothesis import given, settings
from hypothesis import strategies as st

from flight.state.plan import SplitRules, balance, num_micro_batches, pack, split_rows

SIZES = st.lists(st.integers(0, 200), min_size=1, max_size=60)


@st.composite
def orders(draw):
    """Return sizes, group names (groups of up to four rows) and rules."""
    sizes = draw(SIZES)
    per_group = draw(st.integers(1, 4))
    rules = SplitRules(
        num_ranks=draw(st.integers(1, 9)),
        max_tokens_per_micro_batch=draw(st.none() | st.integers(1, 400)),
        max_rows_per_micro_batch=draw(st.none() | st.integers(1, 8)),
        keep_groups=draw(st.booleans()),
    )
    return sizes, [f"g{index // per_group}" for index in range(len(sizes))], rules


@settings(max_examples=300, deadline=None)
@given(orders())
def test_split_holds_every_row_once_within_the_budgets(order):
    """No row is lost or doubled; budgets hold but for single rows; no micro-batch is empty; groups stay on one rank."""
    sizes, groups, rules = order
    split = split_rows(sizes, groups, rules)
    assert len(split) == rules.num_ranks
    everything = [index for rank in split for micro_batch in rank for index in micro_batch]
    assert sorted(everything) == list(range(len(sizes)))
    for micro_batch in (each for rank in split for each in rank):
        assert micro_batch
        assert micro_batch == sorted(micro_batch)
        tokens = sum(sizes[index] for index in micro_batch)
        assert (
            rules.max_tokens_per_micro_batch is None
            or len(micro_batch) == 1
            or (tokens <= rules.max_tokens_per_micro_batch)
        )
        assert rules.max_rows_per_micro_batch is None or len(micro_batch) <= rules.max_rows_per_micro_batch
    if rules.keep_groups:
        ranks_of = {}
        for number, rank in enumerate(split):
            for index in (index for micro_batch in rank for index in micro_batch):
                ranks_of.setdefault(groups[index], set()).add(number)
        assert all(len(ranks) == 1 for ranks in ranks_of.values())


@settings(max_examples=200, deadline=None)
@given(orders())
def test_split_is_balanced_and_even(order):
    """Ranks differ by at most the largest unit; they run equally many micro-batches as far as their rows go."""
    sizes, groups, rules = order
    split = split_rows(sizes, groups, rules)
    loads = [sum(sizes[index] for micro_batch in rank for index in micro_batch) for rank in split]
    units = {}
    for index, size in enumerate(sizes):
        unit = groups[index] if rules.keep_groups else index
        units[unit] = units.get(unit, 0) + size
    assert max(loads) - min(loads) <= max(units.values())
    most = num_micro_batches(split)
    for rank in split:
        assert len(rank) == min(most, sum(map(len, rank)))


@settings(max_examples=100, deadline=None)
@given(orders())
def test_split_is_a_function_of_its_arguments(order):
    """Two servers, or one before and after a restart, split alike."""
    assert split_rows(*order) == split_rows(*order)


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(200, 500))
def test_pack_needs_at_most_twice_the_least_number_of_micro_batches(sizes, budget):
    """No two micro-batches of one rank could be one: best fit leaves at most one of them half empty."""
    bins = pack(range(len(sizes)), sizes, SplitRules(num_ranks=1, max_tokens_per_micro_batch=budget))
    loads = sorted(sum(sizes[index] for index in each) for each in bins)
    assert len(loads) < 2 or loads[0] + loads[1] > budget


def test_balance_of_known_sizes():
    """Largest first, each to the lightest rank."""
    assert balance([7, 1, 5, 3, 2, 6], 2) == [[0, 3, 4], [5, 2, 1]]
    assert balance([1, 1, 1, 1], 2) == [[0, 2], [1, 3]]
    assert balance([], 3) == [[], [], []]


def test_split_of_a_row_beyond_the_budget():
    """It is a micro-batch of its own; its rank has no row for the others."""
    rules = SplitRules(num_ranks=2, max_tokens_per_micro_batch=10)
    assert split_rows([25, 4, 4, 9, 8], ["g"] * 5, rules) == [[[0]], [[1, 2], [3], [4]]]


def test_split_of_a_large_batch_costs_little_more_a_row():
    """Four times the rows take about four times the calls: under the lock nobody may wait long."""
    assert num_calls(4096) < 5 * num_calls(1024)


def num_calls(num_rows: int) -> int:
    """Return how many functions are called to split so many rows."""
    sizes = [(index * 7919) % 4000 + 1 for index in range(num_rows)]
    count = 0

    def seen(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        split_rows(sizes, ["g"] * num_rows, SplitRules(num_ranks=64, max_tokens_per_micro_batch=16_384))
    finally:
        sys.setprofile(None)
    return count
