"""Columns of other services as the trainer gets them, and when proximal logprobs are too old to count."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from relax.roles.given_columns import given_scores, packed, proximal_lag
from relax.train.given import GivenScores

LOGPROBS = [np.array([-1.0, -2.0], np.float32), np.array([-3.0], np.float32)]


@pytest.fixture
def rows() -> pa.Table:
    """Two rows, scored by different services under versions 4 and 5."""
    columns = {name: packed(LOGPROBS) for name in ("ref_logprobs", "proximal_logprobs")}
    return pa.table({"uid": ["a", "b"], "proximal_policy_version": [5, 4], **columns})


def test_columns_that_are_there_are_given(rows):
    """Row by row; the others are the trainer's own matter."""
    given = given_scores(rows)
    for name in ("ref_logprobs", "proximal_logprobs"):
        for found, put in zip(getattr(given, name), LOGPROBS, strict=True):
            np.testing.assert_array_equal(found, put)
    assert (given.values, given.raw_advantages) == (None, None)
    assert given_scores(rows.select(["uid"])) == GivenScores()


@pytest.mark.parametrize(
    ("version", "max_lag", "counts"), [(4, 0, True), (5, 0, False), (5, 1, True), (6, 1, False)]
)
def test_proximal_logprobs_count_while_the_oldest_is_new_enough(rows, version, max_lag, counts):
    """All of a batch or none; other columns do not depend on it."""
    given = given_scores(rows, version, max_lag)
    assert (given.proximal_logprobs is not None) is counts
    assert given.ref_logprobs is not None


def test_lag_is_that_of_the_oldest_row(rows):
    """None where nobody has scored, or nobody says for which step."""
    assert proximal_lag(rows, 7) == 3
    assert proximal_lag(rows, None) is None
    assert proximal_lag(rows.select(["uid"]), 7) is None
