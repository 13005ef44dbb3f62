"""Which faults befall a run and when: a seed in, faults out. Pure: no process, no clock.

Faults are dealt like cards: every kind meets every role that it can before any comes again, in an order that the seed
decides. So a short series sees few kinds and a long one all of them, alike often.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

SERVICES = ("preprocess", "rollout", "recorder", "actor", "queue")
DRIVER, EVERYTHING, HOST = "driver", "everything", "host"
"""Targets that are no services: the program itself, all of its processes at once, the machine that they share."""
ACTOR, QUEUE, RECORDER = "actor", "queue", "recorder"


class Kind(StrEnum):
    """What is done to a run."""

    KILL = "killed"
    KILL_IN_CHECKPOINT = "killed in a checkpoint"
    HANG = "hung"
    """Stopped and never continued: silence must be noticed."""
    STOP = "stopped for a while"
    SLOW = "slowed"
    CUT = "cut off"
    FULL_DISK = "disk full"
    BROKEN_DISK = "writes fail"
    FULL_SHM = "/dev/shm full"
    TORN_JOURNAL = "journal torn"
    DAMAGED_JOURNAL = "journal damaged"


REPLACES = (Kind.KILL, Kind.KILL_IN_CHECKPOINT, Kind.HANG, Kind.TORN_JOURNAL)
"""Kinds after which another process must take the target's place."""
MAY_END_RUN = (Kind.FULL_DISK, Kind.BROKEN_DISK, Kind.DAMAGED_JOURNAL)
"""Kinds after which a run may end with an error, and be resumed; after all others it goes on by itself."""
HOLDS_S = {
    Kind.STOP: (1.0, 12.0),
    Kind.SLOW: (3.0, 10.0),
    Kind.CUT: (0.0, 6.0),
    Kind.FULL_DISK: (1.0, 8.0),
    Kind.BROKEN_DISK: (0.5, 4.0),
    Kind.FULL_SHM: (1.0, 8.0),
}
"""Shortest and longest time for which a kind lasts; the others are over at once."""
GAP_S = (0.2, 4.0)
"""Shortest and longest time between a fault and the next."""

Card = tuple[Kind, str]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, before it is known which process it will meet."""

    number: int
    kind: Kind
    target: str
    gap_s: float
    """Seconds after the fault before it."""
    hold_s: float
    """Seconds for which it lasts."""
    draw: float
    """From 0 to 1, for what is chosen on the spot: which worker, which byte."""

    @property
    def is_alone(self) -> bool:
        """Whether no other fault may come until the run has got over this one, so that its end has one cause."""
        return self.target == EVERYTHING or self.kind in MAY_END_RUN

    def __str__(self) -> str:
        lasting = f" for {self.hold_s:.1f} s" if self.hold_s else ""
        return f"{self.number}: {self.target} {self.kind}{lasting}"


def deck() -> list[Card]:
    """Return every fault once, and what is met most in life twice."""
    cards = [(kind, role) for kind in (Kind.KILL, Kind.HANG) for role in SERVICES]
    cards += [(kind, role) for kind in (Kind.STOP, Kind.SLOW, Kind.CUT) for role in (*SERVICES, DRIVER)]
    cards += [(Kind.KILL, "rollout"), (Kind.KILL, EVERYTHING)]
    cards += [(Kind.KILL_IN_CHECKPOINT, target) for target in (ACTOR, QUEUE, EVERYTHING)]
    cards += [(Kind.BROKEN_DISK, target) for target in (QUEUE, ACTOR, RECORDER)]
    cards += [(Kind.FULL_DISK, HOST), (Kind.FULL_SHM, HOST)]
    return [*cards, (Kind.TORN_JOURNAL, QUEUE), (Kind.DAMAGED_JOURNAL, QUEUE)]


def faults(seed: int, cards: Sequence[Card] | None = None) -> Iterator[Fault]:
    """Yield faults without end, the same ones for the same seed and cards."""
    source = random.Random(seed)
    cards = deck() if cards is None else list(cards)
    number = 0
    while True:
        for kind, target in source.sample(cards, len(cards)):
            number += 1
            yield Fault(
                number=number,
                kind=kind,
                target=target,
                gap_s=source.uniform(*GAP_S),
                hold_s=source.uniform(*HOLDS_S.get(kind, (0.0, 0.0))),
                draw=source.random(),
            )


def cards_of(kinds: Sequence[str], targets: Sequence[str]) -> list[Card]:
    """Return the cards of some kinds, by the names of `Kind` in lower case, and of some targets; without any, all.

    Raises:
        ValueError: a name is unknown, or no card is left.
    """
    known = {kind.name.lower(): kind for kind in Kind}
    all_targets = sorted({target for _, target in deck()})
    for what, names, choices in (("kinds", kinds, [*known]), ("targets", targets, all_targets)):
        if unknown := [name for name in names if name not in choices]:
            raise ValueError(f"--{what}: each must be one of {', '.join(choices)}, got {', '.join(unknown)}")
    chosen = [known[name] for name in kinds] or list(Kind)
    found = [card for card in deck() if card[0] in chosen and (not targets or card[1] in targets)]
    if not found:
        raise ValueError(
            f"--kinds, --targets: a fault must be left, got none of {list(kinds)} for {list(targets)}"
        )
    return found


def run_seed(seed: int, number: int) -> int:
    """Return the seed of the series' run `number`; the first one's is that of the series."""
    return seed if number == 0 else random.Random(f"{seed}/{number}").randrange(1 << 30)
