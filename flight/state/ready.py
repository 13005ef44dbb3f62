"""What is ready for one consumer, in the order in which it goes out; sources share turns by weight. Pure data.

It is not the cursor: leases and attempts are in `flight.state.cursor`. Within a source the lowest order goes first.
Between sources the one with the lowest *turn* goes first, and each delivery moves its turn on by 1 / weight (stride
scheduling, Waldspurger and Weihl 1995). So while sources have something ready, the counts a and b of two of them
never differ by more than one delivery: |a / weight_a - b / weight_b| <= max(1 / weight_a, 1 / weight_b). None starves.
A source that was empty starts again at the present turn: it does not catch up on what it had not to give.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from flight.schema import MixSpec

COMPACT_ABOVE = 1024
"""Entries of removed items that a queue may hold before it is rebuilt without them."""

OTHER = ""
"""The source of whatever the weights do not name."""

Item = TypeVar("Item")
Order = tuple[int, int]
Entry = tuple[int, int, Item]
"""An order and its item."""


class _Line(Generic[Item]):
    """The items of one source. Nearly all come in order: those stand in `in_order`, only the others in a heap."""

    def __init__(self, is_live: Callable[[Item], bool]) -> None:
        self.turn = 0.0
        self._is_live = is_live
        self._in_order: deque[Entry[Item]] = deque()
        self._late: list[Entry[Item]] = []

    def __len__(self) -> int:
        return len(self._in_order) + len(self._late)

    def extend(self, entries: Sequence[Entry[Item]]) -> None:
        """Add entries, which are sorted: at the end or before the front if they belong there, else in between."""
        if not self._in_order or self._in_order[-1][:2] < entries[0][:2]:
            self._in_order.extend(entries)
        elif entries[-1][:2] < self._in_order[0][:2]:
            self._in_order.extendleft(reversed(entries))
        else:
            for entry in entries:
                heapq.heappush(self._late, entry)

    def front(self) -> Item | None:
        """Return the first live item; removed ones before it are forgotten."""
        while len(self):
            item = (self._late if self._is_late_first() else self._in_order)[0][2]
            if self._is_live(item):
                return item
            self._pop_entry()
        return None

    def pop(self, max_items: int) -> list[Item]:
        """Remove and return the first live items, at most `max_items`."""
        items: list[Item] = []
        while len(self) and (num_wanted := max_items - len(items)) > 0:
            if self._late:
                entries = [self._pop_entry()]
            else:
                take_first = self._in_order.popleft
                entries = [take_first() for _ in range(min(num_wanted, len(self._in_order)))]
            items += filter(self._is_live, [entry[2] for entry in entries])
        return items

    def compact(self) -> None:
        """Forget removed items."""
        self._in_order = deque(entry for entry in self._in_order if self._is_live(entry[2]))
        self._late = [entry for entry in self._late if self._is_live(entry[2])]
        heapq.heapify(self._late)

    def _is_late_first(self) -> bool:
        return bool(self._late) and (not self._in_order or self._late[0][:2] < self._in_order[0][:2])

    def _pop_entry(self) -> Entry[Item]:
        return heapq.heappop(self._late) if self._is_late_first() else self._in_order.popleft()


class ReadyQueue(Generic[Item]):
    """Items by source and order. Removed items stay as empty entries until they come to the front.

    An item in order costs O(1), any other O(log items), and each delivery of a mix O(sources).
    """

    def __init__(self, is_live: Callable[[Item], bool], mix: MixSpec | None = None) -> None:
        self._is_live = is_live
        self._mix = mix
        self._lines: dict[str, _Line[Item]] = {}
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
        self.extend([(*order, item)], label)

    def extend(self, entries: Sequence[Entry[Item]], label: object = None) -> None:
        """Add items of one source, sorted by their order."""
        line = self._line(label)
        if line.front() is None:
            line.turn = max(line.turn, self._now)
        line.extend(entries)

    def peek(self) -> Item | None:
        """Return the next item without taking it."""
        source = self._next()
        return None if source is None else self._lines[source].front()

    def pop(self) -> Item | None:
        """Remove and return the next item."""
        return next(iter(self.pop_many(1)), None)

    def pop_many(self, max_items: int) -> list[Item]:
        """Remove and return the next items, at most `max_items`."""
        if self._mix is None:
            return self._line(None).pop(max_items)
        items: list[Item] = []
        while len(items) < max_items and (source := self._next()) is not None:
            line = self._lines[source]
            self._now = line.turn
            line.turn += self._stride(source)
            items += line.pop(1)
        return items

    def unpop(self, item: Item, order: Order, label: object = None) -> None:
        """Put an item back that was popped and not delivered: its source gets the turn back."""
        self.unpop_many([(*order, item)], label)

    def unpop_many(self, entries: Sequence[Entry[Item]], label: object = None) -> None:
        """Put items of one source back, sorted by their order."""
        line = self._line(label)
        line.turn -= self._stride(self.source(label)) * len(entries)
        self._now = min(self._now, line.turn)
        line.extend(entries)

    def compact(self, num_live: int) -> None:
        """Forget removed items if they are most of what is held."""
        num_held = sum(map(len, self._lines.values()))
        if num_held > COMPACT_ABOVE and num_held > 2 * num_live:
            for line in self._lines.values():
                line.compact()

    def _line(self, label: object) -> _Line[Item]:
        source = self.source(label)
        line = self._lines.get(source)
        if line is None:
            line = self._lines[source] = _Line(self._is_live)
        return line

    def _stride(self, source: str) -> float:
        if self._mix is None:
            return 0.0
        return 1.0 / self._mix.weights.get(source, self._mix.other_weight)

    def _next(self) -> str | None:
        ready = [source for source, line in self._lines.items() if line.front() is not None]
        return min(ready, key=lambda source: (self._lines[source].turn, source), default=None)
