"""Which row comes n-th: sources mixed by weight, each shuffled anew every epoch. Pure: it knows sizes, not rows.

The n-th draw is a function of the seed, the sources' sizes and weights, and n. So a position is one number, and going
on from it gives what would have come without the break:

    order = PromptOrder(sizes, seed=0)
    first = [next(order) for _ in range(1000)]
    saved = order.position()                                 # plain values, for JSON
    later = PromptOrder.from_position(saved, sizes, seed=0)  # refuses another seed, size, weight or name

Shuffling holds one permutation a source, 8 bytes a row. Several workers share one order: each takes every
`num_workers`-th draw, and a position of any of them serves all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from relax.data.errors import PositionError
from relax.data.mixing import Mixture


@dataclass(frozen=True)
class SourceSize:
    """What an order has to know of a source."""

    name: str
    num_rows: int
    weight: float = 1.0


class Draw(NamedTuple):
    """The `number`-th draw: row `row` of the source at place `source` in the list, in that source's pass `epoch`."""

    number: int
    source: int
    epoch: int
    row: int


class PromptOrder:
    """An endless iterator of draws with a position.

    Args:
        sources: Names, sizes and weights.
        seed: Decides every permutation.
        shuffle: Whether rows come in another order each epoch; else as they lie in the source.
        share: This worker's number and the number of workers.

    Raises:
        ValueError: there is no source, one is empty, or a weight cannot be kept.
    """

    def __init__(
        self,
        sources: Sequence[SourceSize],
        *,
        seed: int,
        shuffle: bool = True,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        empty = [each.name for each in sources if each.num_rows < 1]
        if empty:
            raise ValueError(f"sources: must each have a row, got none in {empty}")
        self.sources = tuple(sources)
        self._seed, self._shuffle = seed, shuffle
        self._mixture = Mixture([each.weight for each in sources], seed)
        self._first, self._step = share
        self._next = self._first
        self._permutations: dict[int, tuple[int, np.ndarray]] = {}

    @classmethod
    def from_position(
        cls,
        position: dict[str, Any],
        sources: Sequence[SourceSize],
        *,
        seed: int,
        shuffle: bool = True,
        share: tuple[int, int] = (0, 1),
    ) -> PromptOrder:
        """Return the order as it was when `position` was taken, of this or of another worker.

        Raises:
            PositionError: it was taken of another order, or is no position.
        """
        order = cls(sources, seed=seed, shuffle=shuffle, share=share)
        number, digest = position.get("next"), position.get("order")
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise PositionError(f"position: next must be a number from 0, got {number!r}")
        if digest != order._digest():
            raise PositionError(
                f"position: must be of this order {order._digest()}, got {digest!r}; "
                "seed, shuffling, and the names, sizes and weights of the sources must be those it was taken with"
            )
        order._next = number + (order._first - number) % order._step
        return order

    def position(self) -> dict[str, Any]:
        """Return where the order stands, as plain values: `next`, the number of the next draw, and which `order`."""
        return {"next": self._next, "order": self._digest()}

    def draw(self, number: int) -> Draw:
        """Return draw `number`, counted from 0, wherever the order stands."""
        source, num_before = self._mixture.pick(number)
        epoch, slot = divmod(num_before, self.sources[source].num_rows)
        row = int(self._permutation(source, epoch)[slot]) if self._shuffle else slot
        return Draw(number, source, epoch, row)

    def __iter__(self) -> PromptOrder:
        return self

    def __next__(self) -> Draw:
        drawn = self.draw(self._next)
        self._next += self._step
        return drawn

    def _permutation(self, source: int, epoch: int) -> np.ndarray:
        kept = self._permutations.get(source)
        if kept is None or kept[0] != epoch:
            words = [self._seed, epoch, source] if source else [self._seed, epoch]
            rng = np.random.default_rng(words)
            kept = (epoch, rng.permutation(self.sources[source].num_rows))
            self._permutations[source] = kept
        return kept[1]

    def _digest(self) -> str:
        sizes = [[each.name, each.num_rows] for each in self.sources]
        facts = [self._seed, self._shuffle, sizes, self._mixture.shares]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
