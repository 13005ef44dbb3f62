"""Which storage servers have joined a coordinator, what they hold, and what they may free. Pure; not thread-safe.

    join --> open --leaving--> leaving --leave--> gone
               |                  |
               +---- silent ------+--> lost: its rows are the caller's to remove, its number is never used again

An owner frees what it is told in the answer to its beats. An answer may be lost, so what it said is kept until a later
beat shows that it arrived; freeing twice is harmless.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flight.errors import UnavailableError
from flight.storage import addresses
from flight.storage.messages import BeatAnswer, OwnerInfo, Placement, StorageBeat
from flight.storage.stubs import Stub

LOST_AFTER_S = 10.0
"""Silence after which an owner is given up; it speaks about once a second."""

REGISTRATIONS_KEPT = 4096
"""Registered batches remembered an owner, for when it did not hear the answer."""


@dataclass(slots=True)
class Owner:
    """One storage server."""

    owner: int
    location: str
    capacity_bytes: int | None
    heard_at: float
    used_bytes: int = 0
    num_rows: int = 0
    is_leaving: bool = False
    seq: int = 0
    unheard: list[np.ndarray] = field(default_factory=list)
    """Numbers that may be free, told in the answer `seq` or not yet."""
    num_told: int = 0
    """Arrays of `unheard` that the answer `seq` told."""
    registered: OrderedDict[int, None] = field(default_factory=OrderedDict)
    refused: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """First numbers of batches that must not be registered any more."""


class OwnerBook:
    """Owners by number. `version` grows when others may take rows than before."""

    def __init__(self, *, new_number: Callable[[], int] = lambda: 1 + secrets.randbelow(addresses.MAX_OWNER)):
        self.version = 0
        self.has_stubs = False
        """Whether the values of any row have ever been elsewhere; until then nothing here costs anything."""
        self.num_lost = 0
        self.remote_bytes: dict[str, int] = {}
        """Bytes that owners hold, by table."""
        self.locations: Mapping[int, str] = {}
        """Where owners are; replaced, never changed."""
        self._new_number = new_number
        self._owners: dict[int, Owner] = {}
        self._used_numbers: set[int] = set()

    def join(self, location: str, capacity_bytes: int | None, now: float) -> int:
        """Add an owner and return its number."""
        number = self._new_number()
        while number in self._used_numbers:
            number = self._new_number()
        self._used_numbers.add(number)
        self._owners[number] = Owner(number, location, capacity_bytes, now)
        self._has_changed()
        return number

    def at(self, location: str) -> list[int]:
        """Return the owners of a location."""
        return [each.owner for each in self._owners.values() if each.location == location]

    def silent(self, now: float) -> list[int]:
        """Return the owners that have said nothing for too long."""
        return [each.owner for each in self._owners.values() if now - each.heard_at > LOST_AFTER_S]

    def remove(self, owner: int, num_lost: int = 0) -> str:
        """Forget an owner; return where it was, an empty string if it was not there."""
        found = self._owners.pop(owner, None)
        self.num_lost += num_lost
        if found is None:
            return ""
        self._has_changed()
        return found.location

    def placement(self, now: float) -> Placement:
        """Return who takes rows."""
        owners = [
            OwnerInfo(
                owner=each.owner,
                location=each.location,
                state="leaving" if each.is_leaving else "open",
                num_rows=each.num_rows,
                used_bytes=each.used_bytes,
                capacity_bytes=each.capacity_bytes,
                silent_s=round(max(now - each.heard_at, 0.0), 3),
            )
            for each in self._owners.values()
        ]
        return Placement(version=self.version, owners=owners, num_lost=self.num_lost)

    # ---- beats ------------------------------------------------------------------------------------------------

    def hear(self, beat: StorageBeat, now: float) -> bool:
        """Note a beat; return whether the answer should not wait."""
        owner = self._owners.get(beat.owner)
        if owner is None:
            return True
        owner.heard_at = now
        owner.used_bytes = beat.used_bytes
        if beat.heard == owner.seq:
            del owner.unheard[: owner.num_told]
            owner.num_told = 0
        if beat.is_leaving and not owner.is_leaving:
            owner.is_leaving = True
            self._has_changed()
        return bool(owner.unheard or beat.unsettled)

    def has_news(self, owner: int) -> bool:
        """Return whether an owner that waits should be answered."""
        found = self._owners.get(owner)
        return found is None or len(found.unheard) > 0

    def answer(self, beat: StorageBeat, now: float) -> BeatAnswer:
        """Return the answer to a beat; batches that are unsettled and not registered never will be."""
        owner = self._owners.get(beat.owner)
        if owner is None:
            return BeatAnswer(is_known=False)
        owner.heard_at = now
        for first in beat.unsettled:
            if first not in owner.registered:
                owner.refused[first] = None
                _forget_oldest(owner.refused)
        if owner.unheard:
            owner.seq += 1
            owner.num_told = len(owner.unheard)
        numbers = np.sort(np.concatenate(owner.unheard)) if owner.unheard else np.empty(0, np.int64)
        return BeatAnswer(
            is_known=True,
            seq=owner.seq,
            free=addresses.to_runs(numbers),
            settled=[first for first in beat.unsettled if first in owner.registered],
            num_rows=owner.num_rows,
        )

    # ---- rows -------------------------------------------------------------------------------------------------

    def admit(self, stub: Stub) -> None:
        """Let the rows of a stub in.

        Raises:
            UnavailableError: their owner is given up, or has given up this batch.
        """
        owner = self._owners.get(stub.owner)
        if owner is None or stub.first in owner.refused:
            raise UnavailableError(
                f"register: owner must be a storage server that has joined, got {stub.owner}, which is given up; "
                "it joins again by itself"
            )

    def add(self, table: str, stub: Stub, num_rows: int, num_bytes: int) -> None:
        """Note rows whose values an owner has."""
        owner = self._owners[stub.owner]
        owner.registered[stub.first] = None
        _forget_oldest(owner.registered)
        owner.num_rows += num_rows
        self.has_stubs = True
        self.remote_bytes[table] = self.remote_bytes.get(table, 0) + num_bytes

    def free(self, table: str, found: Sequence[np.ndarray], num_bytes: int) -> bool:
        """Note that nobody needs the values at these addresses, given by part; return whether any owner has them."""
        self.remote_bytes[table] = self.remote_bytes.get(table, 0) - num_bytes
        if not found:
            return False
        gone = np.unique(np.concatenate(found))
        gone = gone[gone >= 0]
        owner_of = addresses.owners_of(gone)
        for number in np.unique(owner_of).tolist():
            owner = self._owners.get(number)
            if owner is not None:
                numbers = addresses.numbers_of(gone[owner_of == number])
                owner.unheard.append(numbers)
                owner.num_rows -= len(numbers)
        return bool(len(gone))

    def _has_changed(self) -> None:
        self.version += 1
        self.locations = {each.owner: each.location for each in self._owners.values()}


def _forget_oldest(kept: OrderedDict[int, None]) -> None:
    while len(kept) > REGISTRATIONS_KEPT:
        kept.popitem(last=False)
