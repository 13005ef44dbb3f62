"""Who has which bytes of an arena: slots, counted references, first fit. Pure; not thread-safe.

First fit keeps the low addresses in use, whose pages are there already. Numbers of slots are never used again, so that
a message about a slot that is gone cannot touch the one that has its bytes now.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

ALIGNMENT_BYTES = 4096
"""Slots begin at pages."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Bytes that somebody holds: `size_bytes` from `offset`, without what pads them to whole pages."""

    slot_id: int
    offset: int
    size_bytes: int


class Arena:
    """Slots of one block of memory."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.used_bytes = 0
        """Bytes of all slots, padding included."""
        self._free: list[tuple[int, int]] = [(0, self.capacity_bytes)] if self.capacity_bytes else []
        self._slots: dict[int, Slot] = {}
        self._references: dict[int, int] = {}
        self._starts: list[tuple[int, int]] = []
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def free_regions(self) -> list[tuple[int, int]]:
        """Return (offset, size) of what nobody holds, by offset; no two of them touch."""
        return list(self._free)

    def allocate(self, size_bytes: int) -> Slot | None:
        """Return a slot with one reference, None if no region is large enough."""
        padded = _padded(size_bytes)
        for index, (offset, size) in enumerate(self._free):
            if size >= padded:
                self._free[index : index + 1] = [(offset + padded, size - padded)] if size > padded else []
                slot = Slot(self._next_id, offset, size_bytes)
                self._next_id += 1
                self._slots[slot.slot_id] = slot
                self._references[slot.slot_id] = 1
                insort(self._starts, (offset, slot.slot_id))
                self.used_bytes += padded
                return slot
        return None

    def get(self, slot_id: int) -> Slot | None:
        """Return a slot that is held, None if it is free again or never was."""
        return self._slots.get(slot_id)

    def find(self, offset: int) -> Slot | None:
        """Return the slot that a byte belongs to."""
        index = bisect_right(self._starts, (offset, self._next_id)) - 1
        if index < 0:
            return None
        slot = self._slots[self._starts[index][1]]
        return slot if offset < slot.offset + _padded(slot.size_bytes) else None

    def hold(self, slot_id: int) -> None:
        """Add a reference to a slot that is held already.

        Raises:
            KeyError: it is free.
        """
        self._references[slot_id] += 1

    def release(self, slot_id: int) -> None:
        """Take a reference back; the last one frees the slot.

        Raises:
            KeyError: it is free.
        """
        self._references[slot_id] -= 1
        if self._references[slot_id]:
            return
        del self._references[slot_id]
        slot = self._slots.pop(slot_id)
        del self._starts[bisect_left(self._starts, (slot.offset, slot_id))]
        padded = _padded(slot.size_bytes)
        self.used_bytes -= padded
        self._give_back(slot.offset, padded)

    def _give_back(self, offset: int, size: int) -> None:
        index = bisect_left(self._free, (offset, 0))
        first, last = index, index
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free[index][1]
            last += 1
        if index and sum(self._free[index - 1]) == offset:
            offset, before = self._free[index - 1]
            size += before
            first -= 1
        self._free[first:last] = [(offset, size)]


def _padded(size_bytes: int) -> int:
    return max(1, -(-size_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
