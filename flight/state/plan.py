"""How rows are split over data-parallel ranks and cut into micro-batches. Pure functions of sizes and names.

It is not the plan that ranks ask for by id: that is `flight.state.plan_book`. A size is whatever should be balanced,
tokens as a rule. Rows are named by their index.

Ranks: largest first, each to the rank with the least so far (Graham 1969, "Bounds on multiprocessing timing
anomalies"). The heaviest and the lightest rank differ by at most the largest unit. Micro-batches: largest first, each
into the fullest one with room (best fit decreasing; Johnson, "Near-optimal bin packing algorithms", 1973), about 11/9
of the fewest possible. Then ranks with fewer micro-batches cut their largest ones, so that all ranks have the same
number as far as rows go: collectives of expert and pipeline parallelism count on that.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

Split = list[list[list[int]]]
"""Rank by rank, micro-batch by micro-batch, the indices of the rows in rising order; no micro-batch is empty."""


@dataclass(frozen=True, kw_only=True)
class SplitRules:
    """What a split must keep to.

    max_tokens_per_micro_batch: sum of sizes in a micro-batch; a single row that exceeds it is a micro-batch of its own.
    max_rows_per_micro_batch: rows in a micro-batch.
    keep_groups: all rows of a group go to one rank (not necessarily one micro-batch).
    """

    num_ranks: int
    max_tokens_per_micro_batch: int | None = None
    max_rows_per_micro_batch: int | None = None
    keep_groups: bool = False


def split_rows(sizes: Sequence[int], group_ids: Sequence[str], rules: SplitRules) -> Split:
    """Return which rank gets which rows in which micro-batch; every row is there exactly once."""
    units: list[list[int]] = [[index] for index in range(len(sizes))]
    if rules.keep_groups:
        by_group: dict[str, list[int]] = {}
        for index, group_id in enumerate(group_ids):
            by_group.setdefault(group_id, []).append(index)
        units = list(by_group.values())
    ranks = balance([sum(sizes[index] for index in unit) for unit in units], rules.num_ranks)
    split = [pack([index for unit in rank for index in units[unit]], sizes, rules) for rank in ranks]
    most = max(map(len, split))
    return [_cut_up(micro_batches, sizes, most) for micro_batches in split]


def num_micro_batches(split: Split) -> int:
    """Return how many micro-batches every rank runs; a rank with fewer rows than that runs empty ones at the end."""
    return max(map(len, split))


def balance(weights: Sequence[int], num_bins: int) -> list[list[int]]:
    """Return the indices of `weights` by bin; the sums of two bins differ by at most the largest weight."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, 0, number) for number in range(num_bins)]
    for index in sorted(range(len(weights)), key=lambda index: -weights[index]):
        load, count, number = loads[0]
        bins[number].append(index)
        heapq.heapreplace(loads, (load + weights[index], count + 1, number))
    return bins


def pack(indices: Sequence[int], sizes: Sequence[int], rules: SplitRules) -> list[list[int]]:
    """Return rows by micro-batch, few of them, each within the budgets unless it is a single row."""
    if not indices:
        return []
    max_tokens, max_rows = rules.max_tokens_per_micro_batch, rules.max_rows_per_micro_batch
    if max_tokens is None:
        step = max_rows or len(indices)
        return [sorted(indices)[start : start + step] for start in range(0, len(indices), step)]
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens that still fit, bin), rising
    for index in sorted(indices, key=lambda index: -sizes[index]):
        place = bisect_left(room, (sizes[index], -1))
        if place < len(room):
            left, number = room.pop(place)
        else:
            left, number = max_tokens, len(bins)
            bins.append([])
        bins[number].append(index)
        left -= sizes[index]
        if left >= 0 and (max_rows is None or len(bins[number]) < max_rows):
            insort(room, (left, number))
    return sorted(sorted(each) for each in bins)


def _cut_up(micro_batches: list[list[int]], sizes: Sequence[int], number: int) -> list[list[int]]:
    """Halve the largest micro-batches until there are `number`, or only single rows."""
    single = [each for each in micro_batches if len(each) == 1]
    heap = [(-sum(sizes[index] for index in each), each) for each in micro_batches if len(each) > 1]
    heapq.heapify(heap)
    while heap and len(heap) + len(single) < number:
        _, largest = heapq.heappop(heap)
        for half in balance([sizes[index] for index in largest], 2):
            rows = sorted(largest[index] for index in half)
            if len(rows) > 1:
                heapq.heappush(heap, (-sum(sizes[index] for index in rows), rows))
            else:
                single.append(rows)
    return sorted([*single, *(each for _, each in heap)])
