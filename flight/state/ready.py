"""What is ready for one consumer, in the order in which it goes out; sources share turns by weight. Pure data.

It is not the cursor: leases and attempts are in `flight.state.cursor`. Within a source the lowest order goes first.
Between sources the one with the lowest *turn* goes first, and each delivery moves its turn on by 1 / weight (stride
scheduling, Waldspurger and Weihl 1995). So while sources have something ready, the counts a and b of two of them
never differ by more than one delivery: |a / weight_a - b / weight_b| <= max(1 / weight_a, 1 / weight_b). None starves.
A source that was empty starts again at the present turn: it does not catch up on what it had not to give.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

from flight.schema import MixSpec

COMPACT_ABOVE = 1024
"""Entries of removed items that a queue may hold before it is rebuilt without them."""

OTHER = ""
"""The source of whatever the weights do not name."""

Item = TypeVar("Item")
Order = tuple[int, int]


class ReadyQueue(Generic[Item]):
    """Items by source and order. Removed items stay as empty entries until they come to the front.

    An operation costs O(log items + sources).
    """

    def __init__(self, is_live: Callable[[Item], bool], mix: MixSpec | None = None) -> None:
        self._is_live = is_live
        self._mix = mix
        self._heaps: dict[str, list[tuple[int, int, Item]]] = {}
        self._turns: dict[str, float] = {}
        self._now = 0.0
        """The turn of the last delivery."""

    def source(self, label: object) -> str:
        """Return the source that a value of the mixing column belongs to."""
        return (
            label
            if self._mix is not None and isinstance(label, str) and label in self._mix.weights
            else OTHER
        )

    def push(self, item: Item, order: Order, label: object = None) -> None:
        """Add an item."""
        source = self.source(label)
        heap = self._heaps.setdefault(source, [])
        if self._front(heap) is None:
            self._turns[source] = max(self._turns.get(source, 0.0), self._now)
        heapq.heappush(heap, (*order, item))

    def peek(self) -> Item | None:
        """Return the next item without taking it."""
        source = self._next()
        return None if source is None else self._heaps[source][0][2]

    def pop(self) -> Item | None:
        """Remove and return the next item."""
        source = self._next()
        if source is None:
            return None
        self._now = self._turns[source]
        self._turns[source] += self._stride(source)
        return heapq.heappop(self._heaps[source])[2]

    def unpop(self, item: Item, order: Order, label: object = None) -> None:
        """Put an item back that was popped and not delivered: its source gets the turn back."""
        source = self.source(label)
        self._turns[source] -= self._stride(source)
        self._now = min(self._now, self._turns[source])
        heapq.heappush(self._heaps[source], (*order, item))

    def compact(self, num_live: int) -> None:
        """Forget removed items if they are most of what is held."""
        num_held = sum(map(len, self._heaps.values()))
        if num_held > COMPACT_ABOVE and num_held > 2 * num_live:
            for source, heap in self._heaps.items():
                self._heaps[source] = [entry for entry in heap if self._is_live(entry[2])]
                heapq.heapify(self._heaps[source])

    def _stride(self, source: str) -> float:
        if self._mix is None:
            return 0.0
        return 1.0 / self._mix.weights.get(source, self._mix.other_weight)

    def _front(self, heap: list[tuple[int, int, Item]]) -> Item | None:
        while heap:
            if self._is_live(heap[0][2]):
                return heap[0][2]
            heapq.heappop(heap)
        return None

    def _next(self) -> str | None:
        ready = [source for source, heap in self._heaps.items() if self._front(heap) is not None]
        return min(ready, key=lambda source: (self._turns[source], source), default=None)
