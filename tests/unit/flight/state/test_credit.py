"""Credit: rows to the row, bytes to within one push, and no grant that breaks the arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flight.errors import InvalidRequestError
from flight.state.credit import MAX_CREDIT, Credit


def test_rows_are_pushed_in_whole_units_as_far_as_the_credit_reaches():
    """Less than the least push is nothing."""
    credit = Credit(5, None)
    assert credit.most_rows(64, 2) == 5
    credit.spend(4, 100)
    assert credit.most_rows(64, 2) == 0
    credit.grant(1, 0)
    assert credit.most_rows(64, 2) == 2


def test_bytes_start_small_and_follow_the_mean_row():
    """The first push finds out how large a row is."""
    credit = Credit(None, 1000)
    assert credit.most_rows(64, 1) == 1
    credit.spend(1, 100)
    assert credit.most_rows(64, 1) == 9
    credit.spend(9, 950)
    assert credit.num_bytes == -50
    assert credit.most_rows(64, 1) == 0
    credit.grant(0, 51)
    assert credit.most_rows(64, 1) == 1


def test_a_credit_that_cannot_be_is_refused():
    """Neither none, nor negative, nor beyond any memory."""
    with pytest.raises(InvalidRequestError, match="credit must be in rows or bytes, got neither"):
        Credit(None, None)
    with pytest.raises(InvalidRequestError) as caught:
        Credit(1, None).grant(-1, 0)
    assert (
        str(caught.value)
        == f"subscription: credit in rows must be from 0 to {MAX_CREDIT} in all, got -1 more"
    )
    with pytest.raises(InvalidRequestError, match="credit in bytes"):
        Credit(None, MAX_CREDIT).grant(0, MAX_CREDIT)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(1, 500),
    st.lists(st.tuples(st.booleans(), st.integers(1, 8), st.integers(1, 100)), max_size=40),
)
def test_what_is_out_never_exceeds_the_credit(rows, num_bytes, course):
    """Rows exactly; bytes to within one push of known rows."""
    credit = Credit(rows, num_bytes)
    out: list[tuple[int, int]] = []
    for finishes, want, row_bytes in course:
        if finishes and out:
            done = out.pop(0)
            credit.grant(*done)
            continue
        most = credit.most_rows(want, 1)
        if most:
            before = sum(size for _, size in out)
            assert before < num_bytes
            out.append((most, most * row_bytes))
            credit.spend(*out[-1])
        assert sum(count for count, _ in out) <= rows
