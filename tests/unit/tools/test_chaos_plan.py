"""The plan of a series of faults: a seed in, faults out."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _tools_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tool's parts be imported as they are when it runs."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def test_faults_of_a_seed_are_always_the_same():
    """What a failed series was is told by its seed."""
    from chaosjob.plan import faults

    first, again, other = (list(itertools.islice(faults(seed), 100)) for seed in (7, 7, 8))
    assert first == again
    assert first != other
    assert [fault.number for fault in first] == list(range(1, 101))


def test_faults_meet_every_target_by_every_kind_before_any_comes_again():
    """Whatever the seed: a series as long as the deck leaves nothing out."""
    from chaosjob.plan import deck, faults

    cards = deck()
    dealt = list(itertools.islice(faults(3), 2 * len(cards)))
    first = Counter((fault.kind, fault.target) for fault in dealt[: len(cards)])
    assert first == Counter(cards)
    assert Counter((fault.kind, fault.target) for fault in dealt[len(cards) :]) == first


def test_faults_last_as_long_as_their_kind():
    """A kind that is over at once has no time of its own."""
    from chaosjob.plan import GAP_S, HOLDS_S, Kind, faults

    for fault in itertools.islice(faults(5), 200):
        low, high = HOLDS_S.get(fault.kind, (0.0, 0.0))
        assert low <= fault.hold_s <= high
        assert GAP_S[0] <= fault.gap_s <= GAP_S[1]
        assert 0.0 <= fault.draw < 1.0
    assert Kind.KILL not in HOLDS_S


def test_deck_has_every_kind_and_the_queue_and_actor_in_a_checkpoint():
    """What a series is for is in it."""
    from chaosjob.plan import EVERYTHING, SERVICES, Kind, deck

    cards = set(deck())
    assert {kind for kind, _ in cards} == set(Kind)
    assert {(Kind.KILL, role) for role in (*SERVICES, EVERYTHING)} <= cards
    assert {(Kind.KILL_IN_CHECKPOINT, role) for role in ("queue", "actor", EVERYTHING)} <= cards


def test_cards_of_names_what_may_be_asked_for():
    """By the names of kinds and targets; a wrong one is refused with the choices."""
    from chaosjob.plan import Kind, cards_of, deck

    assert cards_of([], []) == deck()
    assert set(cards_of(["kill"], ["queue", "actor"])) == {(Kind.KILL, "queue"), (Kind.KILL, "actor")}
    with pytest.raises(ValueError, match=r"^--kinds: each must be one of kill, .*, got burn$"):
        cards_of(["burn"], [])
    with pytest.raises(ValueError, match=r"^--kinds, --targets: a fault must be left, got none"):
        cards_of(["full_disk"], ["queue"])


def test_run_seed_differs_from_run_to_run():
    """The first run has the seed of the series."""
    from chaosjob.plan import run_seed

    seeds = [run_seed(7, number) for number in range(50)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 50
    assert seeds == [run_seed(7, number) for number in range(50)]
