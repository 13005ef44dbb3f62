"""How often somebody may call."""

from __future__ import annotations

from flight.security.limits import CallBucket


def test_bucket_allows_a_seconds_worth_at_once_and_then_its_rate():
    """Half a second later half of it is there again."""
    bucket = CallBucket(10, now=0.0)
    assert [bucket.take(0.0) for _ in range(11)] == [True] * 10 + [False]
    assert [bucket.take(0.5) for _ in range(6)] == [True] * 5 + [False]


def test_bucket_does_not_grow_beyond_a_second():
    """A long silence is no credit."""
    bucket = CallBucket(2, now=0.0)
    assert [bucket.take(1000.0) for _ in range(3)] == [True, True, False]


def test_bucket_of_a_small_rate_allows_one_call():
    """Else nobody could ever call."""
    bucket = CallBucket(0.1, now=0.0)
    assert [bucket.take(0.0), bucket.take(9.0), bucket.take(10.1)] == [True, False, True]
