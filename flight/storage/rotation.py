"""Whom a producer writes to next: storage servers in turn, without those that just failed or were full. Pure.

The coordinator is not among them; it is where rows go when nobody else takes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from flight.storage.messages import OwnerInfo, Placement

AVOID_FAILED_S = 5.0
"""How long one that did not answer is left out."""

AVOID_FULL_S = 0.5
"""How long one that was full is left out."""


class Rotation:
    """Turns of one producer; `start` lets producers begin at different owners."""

    def __init__(self, *, start: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.version = 0
        """The placement's; 0 if none was heard of."""
        self._owners: Sequence[OwnerInfo] = ()
        self._turn = start
        self._clock = clock
        self._avoid_until: dict[int, float] = {}

    def adopt(self, placement: Placement) -> None:
        """Follow a placement from now on."""
        self.version = placement.version
        self._owners = [each for each in placement.owners if each.state == "open"]
        self._avoid_until = {
            owner: until
            for owner, until in self._avoid_until.items()
            if owner in {each.owner for each in self._owners}
        }

    def __len__(self) -> int:
        return len(self._owners)

    def next(self) -> OwnerInfo | None:
        """Return whose turn it is, None if all are to be avoided now."""
        now = self._clock()
        for _ in self._owners:
            owner = self._owners[self._turn % len(self._owners)]
            self._turn += 1
            if self._avoid_until.get(owner.owner, now) <= now:
                return owner
        return None

    def avoid(self, owner: int, for_s: float) -> None:
        """Leave an owner out for a while."""
        self._avoid_until[owner] = self._clock() + for_s
