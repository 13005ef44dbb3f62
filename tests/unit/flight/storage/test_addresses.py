"""Addresses and runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flight.errors import InvalidRequestError
from flight.storage import addresses


@given(st.integers(1, addresses.MAX_OWNER), st.integers(0, 2**40 - 100), st.integers(0, 50))
@settings(max_examples=50, deadline=None)
def test_address_says_owner_and_number(owner, first, num_rows):
    """For every owner and number that there may be; no address is -1."""
    packed = addresses.to_numpy(addresses.pack(owner, first, num_rows))
    assert set(addresses.owners_of(packed).tolist()) <= {owner}
    assert addresses.numbers_of(packed).tolist() == list(range(first, first + num_rows))
    assert (packed >= 0).all()


@given(st.lists(st.integers(0, 60), max_size=60))
@settings(max_examples=100, deadline=None)
def test_runs_stand_for_their_numbers_in_order(numbers):
    """Any numbers, also several times and backwards."""
    runs = addresses.to_runs(np.array(numbers, np.int64))
    assert addresses.from_runs("test", runs).tolist() == numbers
    assert len(runs) <= len(numbers)


def test_runs_of_neighbours_are_one():
    """That is what they are for."""
    assert addresses.to_runs(np.array([3, 4, 5, 9, 10, 2])) == [(3, 3), (9, 2), (2, 1)]


@pytest.mark.parametrize("runs", [[(-1, 2)], [(0, 0)], [(0, 1 << 40)], [(0, 1 << 21)] * 3])
def test_runs_that_cannot_be_are_refused(runs):
    """Before they take memory."""
    with pytest.raises(InvalidRequestError, match="ticket: runs must be of numbers from 0 and counts from 1"):
        addresses.from_runs("ticket", runs)
