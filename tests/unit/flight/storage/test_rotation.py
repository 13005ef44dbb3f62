"""Whose turn it is."""

from __future__ import annotations

from flight.storage.messages import OwnerInfo, Placement
from flight.storage.rotation import Rotation
from tests.kit.clock import FakeClock


def info(owner: int, state: str = "open") -> OwnerInfo:
    """Return a storage server."""
    return OwnerInfo(
        owner=owner, location="", state=state, num_rows=0, used_bytes=0, capacity_bytes=None, silent_s=0.0
    )


def turns(rotation: Rotation, count: int) -> list[int | None]:
    """Return the next owners."""
    return [found.owner if (found := rotation.next()) is not None else None for _ in range(count)]


def test_rotation_takes_turns_without_who_is_leaving():
    """From where it started."""
    rotation = Rotation(start=1)
    assert not rotation
    assert turns(rotation, 1) == [None]
    rotation.adopt(Placement(version=1, owners=[info(1), info(2), info(3, "leaving")]))
    assert turns(rotation, 4) == [2, 1, 2, 1]


def test_rotation_leaves_out_who_failed_for_a_while():
    """And has nobody if all did; a new placement forgets none of it."""
    clock = FakeClock()
    rotation = Rotation(clock=clock)
    rotation.adopt(Placement(version=1, owners=[info(1), info(2)]))
    rotation.avoid(1, 5.0)
    assert turns(rotation, 3) == [2, 2, 2]
    rotation.avoid(2, 1.0)
    assert turns(rotation, 1) == [None]
    rotation.adopt(Placement(version=2, owners=[info(1), info(2), info(3)]))
    assert turns(rotation, 2) == [3, 3]
    clock.advance(1.0)
    assert set(turns(rotation, 4)) == {2, 3}
    clock.advance(4.0)
    assert set(turns(rotation, 4)) == {1, 2, 3}
