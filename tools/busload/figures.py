"""Latencies in a few bytes, and whether memory stayed flat. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

BEGIN, END = "<!-- load_bus -->", "<!-- /load_bus -->"
PER_OCTAVE = 8
"""Classes of latencies between one and its double: a percentile is exact to 9 %."""
MIN_S = 1e-6


@dataclass
class Latencies:
    """How often an operation took how long; of constant size however many there were."""

    counts: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float) -> None:
        """Count one operation."""
        at = max(0, math.ceil(PER_OCTAVE * math.log2(max(seconds, MIN_S) / MIN_S)))
        self.counts[at] = self.counts.get(at, 0) + 1

    def merge(self, counts: Mapping[Any, int]) -> None:
        """Add what another has counted; the keys may have become text on the way."""
        for at, count in counts.items():
            self.counts[int(at)] = self.counts.get(int(at), 0) + count

    @property
    def total(self) -> int:
        """Return how many operations there were."""
        return sum(self.counts.values())

    def percentile_s(self, percent: float) -> float:
        """Return the seconds within which so many percent of the operations were done.

        Raises:
            ValueError: there were none.
        """
        if not self.counts:
            raise ValueError("latencies: operations must be at least one, got none")
        left = max(1, math.ceil(self.total * percent / 100))
        for at in sorted(self.counts):
            left -= self.counts[at]
            if left <= 0:
                return MIN_S * 2 ** (at / PER_OCTAVE)
        return math.inf


@dataclass(frozen=True)
class Growth:
    """Memory in the second and in the last quarter of a run, medians of samples, bytes."""

    second: float
    last: float

    @property
    def share(self) -> float:
        """Return by which share of the former the latter is larger."""
        return self.last / self.second - 1

    def __str__(self) -> str:
        return f"{self.second / 1e6:.0f} to {self.last / 1e6:.0f} MB ({self.share:+.1%})"


def growth(samples: Sequence[float]) -> Growth:
    """Compare the quarters of a run; the first one is for filling caches.

    Raises:
        ValueError: there are fewer than eight samples.
    """
    if len(samples) < 8:
        raise ValueError(f"growth: samples must be at least 8, got {len(samples)}")
    quarter = len(samples) // 4
    return Growth(median(samples[quarter : 2 * quarter]), median(samples[-quarter:]))


def replace_block(page: str, block: str) -> str:
    """Return the page with what is between the two markers replaced.

    Raises:
        ValueError: the page does not have each marker once, in order.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"page: it must have {BEGIN} and then {END} once each; add the two lines")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{block.strip()}\n\n{END}{rest.split(END)[1]}"
