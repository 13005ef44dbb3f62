"""The books of a run."""

from __future__ import annotations

from relax.run.ledger import Ledger


def statistics(**changes: int) -> tuple[dict, dict]:
    counts = {"acked": 5, "ready": 1, "leased": 1, "unready": 0, "skipped": 1, "dead": 0, "requeued": 0}
    taker = counts | changes
    trainer = {"skipped": 0, "dead": 0, "requeued": 0}
    prompts = {"put": 8, "consumers": {"rollout": taker}}
    books = {"trained": 6, "waiting": 2, "dropped": 2, "uniform": 0}
    return prompts, {"put": 10, "consumers": {"actor": trainer}, "staleness": books}


def test_books_that_balance_have_no_difference():
    """Issued is answered, waiting or refused; generated is trained, waiting or dropped; groups are whole."""
    ledger = Ledger.of(*statistics(), group_size=2)
    assert ledger.differences() == {}
    assert ledger.to_facts()["rows_trained"] == 6


def test_what_is_lost_shows():
    """A prompt that nobody knows of, and a group that was answered and never came."""
    assert Ledger.of(*statistics(ready=0), group_size=2).differences() == {"prompts": 1}
    assert Ledger.of(*statistics(acked=6, ready=0), group_size=2).differences() == {"groups": -2}
