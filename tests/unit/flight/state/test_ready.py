"""Whose turn it is: sources share deliveries by weight, whatever comes and goes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flight.errors import InvalidRequestError
from flight.schema import ConsumerSpec, MixSpec
from flight.state.ledger import Ledger, TakeRequest
from flight.state.ready import ReadyQueue
from tests.kit.queues import prompts_spec, rollouts_spec

WEIGHTS = {"maths": 3.0, "code": 1.0, "chat": 0.5}


def filled(weights: dict[str, float], per_source: int, **changes) -> ReadyQueue[tuple[str, int]]:
    """Return a queue with `per_source` items of each source."""
    queue = ReadyQueue(lambda item: True, MixSpec(column="source", weights=weights, **changes))
    for source in weights:
        for number in range(per_source):
            queue.push((source, number), (0, number), source)
    return queue


def test_mix_delivers_in_proportion_and_in_order():
    """Of nine deliveries six are maths, two code, one chat; each source's own order is kept."""
    queue = filled(WEIGHTS, 20)
    items = [queue.pop() for _ in range(18)]
    assert [source for source, _ in items].count("maths") == 12
    assert [source for source, _ in items].count("code") == 4
    assert [source for source, _ in items].count("chat") == 2
    assert [number for source, number in items if source == "maths"] == list(range(12))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from("abcde"), st.floats(0.1, 20.0), min_size=2), st.integers(1, 60))
def test_mix_never_strays_by_more_than_one_delivery(weights, num_pops):
    """While all sources have items, counts over weights differ by at most one delivery of the lighter one."""
    queue = filled(weights, num_pops)
    counts = dict.fromkeys(weights, 0)
    for _ in range(num_pops):
        expected = queue.peek()
        assert queue.pop() == expected
        counts[expected[0]] += 1
    for one in weights:
        for other in weights:
            gap = counts[one] / weights[one] - counts[other] / weights[other]
            assert gap <= max(1 / weights[one], 1 / weights[other]) + 1e-9


def test_mix_gives_an_absent_source_no_credit():
    """A source that had nothing for a while starts at the present turn; then it gets its share, not all it missed."""
    queue = ReadyQueue(lambda item: True, MixSpec(column="source", weights={"a": 1.0, "b": 1.0}))
    for number in range(100):
        queue.push(("a", number), (0, number), "a")
    for _ in range(50):
        queue.pop()
    for number in range(100):
        queue.push(("b", number), (0, number), "b")
    assert [queue.pop()[0] for _ in range(10)].count("b") in (5, 6)


def test_mix_returns_the_turn_of_what_was_not_delivered():
    """A take that gives up leaves the queue as it was, however often."""
    queue = filled(WEIGHTS, 30)
    for _ in range(100):
        tried = [queue.pop() for _ in range(7)]
        for source, number in tried:
            queue.unpop((source, number), (0, number), source)
    assert queue.pop() == filled(WEIGHTS, 30).pop()
    assert [queue.pop()[0] for _ in range(17)].count("maths") in (11, 12)


def test_mix_puts_unnamed_sources_together():
    """Sources without a weight, and rows without a source, share one turn."""
    queue = ReadyQueue(lambda item: True, MixSpec(column="source", weights={"a": 2.0}, other_weight=1.0))
    for number in range(30):
        queue.push(number, (0, number), ["a", "x", None][number % 3])
    kinds = [queue.pop() % 3 for _ in range(12)]
    assert kinds.count(0) == 8


def test_removed_items_are_skipped_and_forgotten():
    """What is not live any more never comes out, and does not pile up."""
    gone = set()
    queue = ReadyQueue(lambda item: item not in gone)
    for number in range(5000):
        queue.push(number, (0, number))
    gone |= set(range(4999))
    queue.compact(1)
    assert queue.peek() == 4999
    assert queue.pop() == 4999
    assert queue.pop() is None


def test_prompts_are_mixed_by_source():
    """Through the ledger: two of three prompts that a rollout gets are maths, as long as there are any."""
    spec = prompts_spec(
        consumers=(
            ConsumerSpec(
                name="rollout", columns=("text",), mix=MixSpec(column="text", weights={"maths": 2, "chat": 1})
            ),
        ),
        tickets=None,
    )
    ledger = Ledger()
    ledger.create(spec)
    uids = [f"p{index}" for index in range(40)]
    labels = {"text": ["maths" if index < 20 else "chat" for index in range(40)]}
    ledger.put("prompts", uids, uids, 1, None, labels)
    first = ledger.take("prompts", TakeRequest(consumer="rollout", max_rows=12), 0.0)
    sources = [row.labels["text"] for row in first.lease.rows()]
    assert sources.count("maths") == 8
    rest = ledger.take("prompts", TakeRequest(consumer="rollout", max_rows=100), 0.0)
    assert len(rest.lease.rows()) == 28


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (
            MixSpec(column="nowhere", weights={"a": 1}),
            "column must be a string column among ['text'], got 'nowhere'",
        ),
        (MixSpec(column="text", weights={}), "weights must be given and positive, got [{}, 1.0]"),
        (MixSpec(column="text", weights={"a": 0}), "weights must be given and positive, got [{'a': 0}, 1.0]"),
    ],
)
def test_mix_that_cannot_work_is_refused(mix, message):
    """Unknown columns and weights that would starve a source are refused when the table is made."""
    with pytest.raises(InvalidRequestError) as caught:
        prompts_spec(consumers=(ConsumerSpec(name="rollout", columns=("text",), mix=mix),))
    assert str(caught.value) == f"table 'prompts', mix of consumer 'rollout': {message}"


def test_mix_at_the_staleness_exit_is_refused():
    """The oldest version goes first there; sources are mixed where prompts are taken."""
    mix = MixSpec(column="policy_version_start", weights={"a": 1})
    consumer = ConsumerSpec(name="actor", columns=("policy_version_start",), sampler="groups", mix=mix)
    with pytest.raises(InvalidRequestError, match="consumer must be another one than the staleness consumer"):
        rollouts_spec(consumers=(consumer,))
