"""Slots of an arena: nothing overlaps, nothing is lost, nothing is freed that somebody holds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flight.shared.arena import ALIGNMENT_BYTES, Arena

PAGE = ALIGNMENT_BYTES


class ArenaMachine(RuleBasedStateMachine):
    """Compares an arena with a list of references."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(16 * PAGE + 17)
        self.references: dict[int, int] = {}
        self.slots: dict[int, tuple[int, int]] = {}
        self.seen: set[int] = set()

    @rule(size=st.integers(1, 9 * PAGE))
    def allocate(self, size):
        """A slot is refused only if no hole is large enough, and its number is new."""
        pages = -(-size // PAGE)
        holes = [hole for _, hole in self.arena.free_regions]
        slot = self.arena.allocate(size)
        assert (slot is None) == (max(holes, default=0) < pages * PAGE)
        if slot is not None:
            assert slot.slot_id not in self.seen
            assert slot.offset % PAGE == 0
            assert slot.size_bytes == size
            self.seen.add(slot.slot_id)
            self.references[slot.slot_id] = 1
            self.slots[slot.slot_id] = (slot.offset, pages * PAGE)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def hold(self, data):
        """One more holder."""
        slot_id = data.draw(st.sampled_from(sorted(self.references)))
        self.arena.hold(slot_id)
        self.references[slot_id] += 1

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data):
        """The last holder frees it."""
        slot_id = data.draw(st.sampled_from(sorted(self.references)))
        self.arena.release(slot_id)
        self.references[slot_id] -= 1
        if not self.references[slot_id]:
            del self.references[slot_id], self.slots[slot_id]
            assert self.arena.get(slot_id) is None

    @invariant()
    def all_bytes_are_in_one_slot_or_hole(self):
        """Slots and holes tile the arena; no two holes touch."""
        holes = self.arena.free_regions
        tiles = sorted([*self.slots.values(), *holes])
        ends = [offset + size for offset, size in tiles]
        assert [offset for offset, _ in tiles] == [0, *ends][: len(tiles)]
        assert ends[-1] == self.arena.capacity_bytes == 16 * PAGE
        assert all(first + size < second for (first, size), (second, _) in itertools.pairwise(holes))
        assert self.arena.used_bytes == sum(size for _, size in self.slots.values())
        assert len(self.arena) == len(self.slots)

    @invariant()
    def every_byte_finds_its_slot(self):
        """Also the bytes that pad it."""
        for slot_id, (offset, size) in self.slots.items():
            for byte in (offset, offset + size - 1):
                found = self.arena.find(byte)
                assert found is not None
                assert found.slot_id == slot_id
        assert all(self.arena.find(offset) is None for offset, _ in self.arena.free_regions)


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_arena_refuses_references_to_slots_that_are_free():
    """A late message about a slot does not touch the one that has its bytes now."""
    arena = Arena(2 * PAGE)
    first = arena.allocate(10)
    arena.release(first.slot_id)
    second = arena.allocate(10)
    assert second.offset == first.offset
    with pytest.raises(KeyError):
        arena.release(first.slot_id)
    with pytest.raises(KeyError):
        arena.hold(first.slot_id)
    assert arena.get(second.slot_id) == second


def test_arena_smaller_than_a_page_has_no_room():
    """It refuses, and finds nothing."""
    arena = Arena(100)
    assert (arena.capacity_bytes, arena.allocate(1), arena.find(0)) == (0, None, None)
