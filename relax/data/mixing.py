"""Which source the n-th prompt comes from, when several are mixed by weight. Pure: no rows, no files, no state kept.

Weights become whole shares that add up to one period, 7:2:1 for 0.7, 0.2 and 0.1. Each period holds every source
exactly as often as its share says, in an order that the seed and the period's number decide. So any draw can be found
without those before it, and after n draws a source has had its share of n to within one share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_PERIOD = 10_000
"""Draws in the longest period: a weight is kept to one part in so many."""

_STREAM = 0x6D6978
"""Keeps the generator of the mixture apart from those of the sources' rows."""


class Pick(NamedTuple):
    """A source by its place in the list, and how many draws it had before this one."""

    source: int
    num_before: int


class Mixture:
    """A repeating, reshuffled schedule of sources.

    Args:
        weights: One a source, in any unit; above 0.
        seed: Decides the order within a period.

    Raises:
        ValueError: a weight is not above 0, or too small a part of the whole to be kept.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.shares = whole_shares(weights)
        self.period = sum(self.shares)
        self._seed = seed
        self._cached: tuple[int, np.ndarray, np.ndarray] | None = None

    def pick(self, number: int) -> Pick:
        """Return the source of draw `number`, counted from 0."""
        turn, slot = divmod(number, self.period)
        if self.period == 1:
            return Pick(0, turn)
        sources, ranks = self._turn(turn)
        source = int(sources[slot])
        return Pick(source, turn * self.shares[source] + int(ranks[slot]))

    def _turn(self, turn: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sources of one period [period] and how often each had come before in it [period]."""
        if self._cached is None or self._cached[0] != turn:
            slots = np.repeat(np.arange(len(self.shares)), self.shares)
            sources = np.random.default_rng([self._seed, turn, _STREAM]).permutation(slots)
            ranks = np.empty_like(sources)
            for source, share in enumerate(self.shares):
                ranks[sources == source] = np.arange(share)
            self._cached = (turn, sources, ranks)
        return self._cached[1], self._cached[2]


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in the proportion of `weights`, to one part in `MAX_PERIOD`.

    Raises:
        ValueError: there is no weight, or one is not above 0, or too small a part of the whole to be kept.
    """
    if not weights or not all(math.isfinite(each) and each > 0 for each in weights):
        raise ValueError(f"weights: must be one or more numbers above 0, got {list(weights)}")
    parts = [each / math.fsum(weights) * MAX_PERIOD for each in weights]
    shares = [math.floor(each + 1e-6) for each in parts]
    by_rest = sorted(range(len(parts)), key=lambda each: shares[each] - parts[each])
    for each in by_rest[: MAX_PERIOD - sum(shares)]:
        shares[each] += 1
    if min(shares) == 0:
        raise ValueError(
            f"weights: must each be at least 1/{MAX_PERIOD} of their sum, got {list(weights)}; "
            "raise the smallest or leave it out"
        )
    divisor = math.gcd(*shares)
    return tuple(each // divisor for each in shares)
