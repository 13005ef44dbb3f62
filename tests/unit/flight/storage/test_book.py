"""Who has joined a coordinator, and what they hear."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flight.errors import UnavailableError
from flight.storage import addresses
from flight.storage.book import LOST_AFTER_S, OwnerBook
from flight.storage.messages import StorageBeat
from flight.storage.stubs import Stub


def book() -> OwnerBook:
    """Return a book that numbers owners from 1."""
    return OwnerBook(new_number=itertools.count(1).__next__)


def beat(found: OwnerBook, owner: int, *, heard: int = 0, unsettled: tuple[int, ...] = (), now: float = 0.0):
    """Return the answer to a beat."""
    message = StorageBeat(owner=owner, used_bytes=7, heard=heard, unsettled=list(unsettled))
    found.hear(message, now)
    return found.answer(message, now)


def at(owner: int, *numbers: int) -> np.ndarray:
    """Return addresses."""
    return np.array([(owner << addresses.NUMBER_BITS) + number for number in numbers], np.int64)


def put(found: OwnerBook, owner: int, first: int, num_rows: int, num_bytes: int = 0) -> None:
    """Register rows."""
    stub = Stub(owner, first, num_bytes)
    found.admit(stub)
    found.add("rows", stub, num_rows, num_bytes)


def test_book_costs_nothing_before_anybody_joins():
    """No version, no stubs, nowhere to look."""
    empty = book()
    assert (empty.version, empty.has_stubs, empty.locations, empty.silent(1e9)) == (0, False, {}, [])


def test_book_tells_what_is_free_until_it_was_heard():
    """An answer that is lost is said again, with what came since."""
    found = book()
    owner = found.join("grpc://a", None, 0.0)
    put(found, owner, 0, 10, 1000)
    assert found.free("rows", [at(owner, 3, 4), at(owner, 4, 3)], 200)
    first = beat(found, owner)
    assert (first.free, first.num_rows) == ([(3, 2)], 8)
    found.free("rows", [at(owner, 5)], 100)
    second = beat(found, owner, heard=0)
    assert second.free == [(3, 3)]
    assert found.has_news(owner)
    assert beat(found, owner, heard=second.seq).free == []
    assert not found.has_news(owner)
    assert found.remote_bytes == {"rows": 700}


def test_book_settles_what_was_not_answered():
    """What is registered stands; what is not never will be."""
    found = book()
    owner = found.join("grpc://a", None, 0.0)
    put(found, owner, 0, 2)
    assert beat(found, owner, unsettled=(0, 2)).settled == [0]
    with pytest.raises(UnavailableError, match="it joins again by itself"):
        found.admit(Stub(owner, 2, 0))
    found.admit(Stub(owner, 4, 0))


def test_book_gives_up_who_is_silent_and_knows_it_no_more():
    """Its number is not used again, and what it says later has no effect."""
    found = book()
    owner, other = found.join("grpc://a", None, 0.0), found.join("grpc://b", None, 0.0)
    beat(found, other, now=LOST_AFTER_S)
    assert found.silent(LOST_AFTER_S) == []
    assert found.silent(LOST_AFTER_S + 0.1) == [owner]
    assert found.remove(owner, 5) == "grpc://a"
    assert not beat(found, owner).is_known
    assert found.locations == {other: "grpc://b"}
    assert found.join("grpc://a", None, 0.0) == 3
    assert found.placement(0.0).num_lost == 5
    with pytest.raises(UnavailableError, match="must be a storage server that has joined, got 1"):
        found.admit(Stub(owner, 0, 0))


def test_book_has_a_new_version_whenever_others_take_rows():
    """Joined, leaving, gone."""
    found = book()
    owner = found.join("grpc://a", 100, 0.0)
    versions = [found.version]
    for _ in range(2):
        found.hear(StorageBeat(owner=owner, used_bytes=9, is_leaving=True), 1.0)
        versions.append(found.version)
    [info] = found.placement(3.0).owners
    assert (info.state, info.used_bytes, info.capacity_bytes, info.silent_s) == ("leaving", 9, 100, 2.0)
    found.remove(owner)
    assert [*versions, found.version] == [1, 2, 2, 3]
