"""How rows leave a table: dead letters, age, truncation; and how a table in use grows."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flight.errors import InvalidRequestError, LeaseLostError
from flight.schema import Column, ConsumerSpec
from flight.state.evolution import evolve
from tests.unit.flight.test_table import grouped, make_table, take, uids_of


def kill(table, consumer="train", times=2):
    """Give everything that is ready back until it is dead."""
    for _ in range(times):
        lease = take(table, consumer, 9)
        table.nack(consumer, lease.lease_id, None, reason="cannot decode")


def test_dead_letter_is_kept_until_it_is_requeued():
    """It says who gave it up, after how many deliveries and why; requeued, it is delivered as if new."""
    table = make_table(consumers=(ConsumerSpec(name="train", columns=()),))
    table.put(["a", "b"], ["a", "b"], 1)
    kill(table)
    assert [(each.consumer, each.attempts, each.reason) for each in table.dead.of("train")] == [
        ("train", 2, "cannot decode"),
        ("train", 2, "cannot decode"),
    ]
    assert (len(table.rows), table.num_reserved, table.num_held) == (2, 0, 2)
    assert table.requeue("train", ["b", "unknown"]) == 1
    assert table.requeue("train", ["b"]) == 0
    lease = take(table, "train", 9)
    assert uids_of(lease) == ["b"]
    assert [unit.attempts for unit in lease.units.values()] == [1]
    table.ack("train", lease.lease_id, None)
    assert table.retired == [1]
    assert [row.uid for row in table.rows.values()] == ["a"]
    with pytest.raises(InvalidRequestError) as caught:
        table.requeue("nobody", None)
    assert str(caught.value) == "requeue rollouts: consumer must be one of ['train'], got 'nobody'"


def test_dead_letter_of_one_consumer_is_no_matter_of_the_others():
    """The other consumer finishes its copy; the keyed one asks for it again after the requeue."""
    table = make_table()
    table.put(["a"], ["a"], 3)
    kill(table)
    assert table.buried == {}
    table.ack("record", take(table, "record", 1).lease_id, None)
    assert list(table.buried) == [0]
    assert table.requeue("train", None) == 1
    table.ack("train", take(table, "train", 1).lease_id, None)
    assert table.ack("media", None, ["a"]) == 1
    assert table.retired == [0]


def test_dead_groups_come_back_whole():
    """One uid of a group names all of it."""
    table = grouped()
    table.put(["a0", "a1", "b0", "b1"], ["a", "a", "b", "b"], 1)
    kill(table)
    assert table.requeue("train", ["b1"]) == 2
    assert uids_of(take(table, "train", 2)) == ["b0", "b1"]


def test_oldest_dead_letters_go_when_they_are_too_many():
    """The limit is in rows; what goes is counted and retired."""
    table = make_table(consumers=(ConsumerSpec(name="train", columns=()),), max_dead_letters=2)
    table.put(["a", "b", "c"], ["a", "b", "c"], 1)
    kill(table)
    assert [row.uid for row in table.rows.values()] == ["b", "c"]
    assert (table.retired, table.counts["dead_discarded"], table.dead.num_rows) == ([0], 1, 2)
    assert table.discard_oldest_dead()
    assert table.discard_oldest_dead()
    assert not table.discard_oldest_dead()
    assert not table.rows


def test_rows_leave_when_they_are_too_old():
    """Age counts from the put; a row on lease may finish; the late repeat of an expired row is a duplicate."""
    table = make_table(consumers=(ConsumerSpec(name="train", columns=()),), max_age_s=10.0, max_attempts=9)
    table.put(["a", "b"], ["a", "b"], 1, now=0.0)
    table.put(["c"], ["c"], 1, now=5.0)
    assert table.next_age_check() == 10.0
    lease = take(table, "train", 1, now=8.0, lease_s=4.0)
    assert table.expire_old(9.9) == 0
    assert table.expire_old(10.0) == 1
    assert [row.uid for row in table.rows.values()] == ["a", "c"]
    assert table.next_age_check() == 12.0
    table.cursor("train").renew(lease.lease_id, 13.0)
    assert table.expire_old(12.0) == 0
    table.nack("train", lease.lease_id, None, reason="busy")
    assert table.expire_old(12.5) == 1
    assert table.expire_old(15.0) == 1
    assert table.next_age_check() is None
    assert table.counts["expired"] == 3
    assert table.put(["a"], ["a"], 1, now=16.0).num_duplicates == 1
    assert [event.kind for event in table.events if event.kind == "expired"] == ["expired"] * 3


def test_group_expires_with_its_oldest_row():
    """Half a group is of no use to those that take whole ones."""
    table = grouped(max_age_s=10.0)
    table.put(["a0"], ["a"], 1, now=0.0)
    table.put(["a1", "b0", "b1"], ["a", "b", "b"], 1, now=6.0)
    assert table.expire_old(10.0) == 2
    assert uids_of(take(table, "train", 9)) == ["b0", "b1"]


def test_truncate_begins_anew_but_numbers_go_on():
    """Leases are void, uids may come again, the end is forgotten."""
    table = grouped()
    table.put(["a0", "a1", "b0"], ["a", "a", "b"], 1)
    table.seal()
    lease = take(table, "train", 1)
    assert table.truncate() == 3
    assert (len(table.rows), table.num_reserved, table.is_closed) == (0, 0, False)
    with pytest.raises(LeaseLostError):
        table.ack("train", lease.lease_id, None)
    assert table.put(["a0", "a1"], ["a", "a"], 1).row_ids == [3, 4]
    table.seal(2)
    assert table.is_closed
    assert uids_of(take(table, "train", 1)) == ["a0", "a1"]
    assert [event.kind for event in table.events] == ["truncated"] * 3


def test_truncate_forgets_dead_letters():
    """They are rows like others."""
    table = make_table()
    table.put(["a", "b"], ["a", "b"], 3)
    kill(table)
    assert table.truncate() == 2
    assert (table.dead.num_rows, table.buried, table.requeue("train", None)) == (0, {}, 0)


def test_new_consumer_starts_at_the_oldest_row_that_is_there():
    """Rows that others have finished with are gone; those of a new writer are not ready before it wrote."""
    table = make_table(consumers=(ConsumerSpec(name="train", columns=("tokens",)),))
    table.put(["a", "b"], ["a", "b"], 1)
    table.ack("train", take(table, "train", 1).lease_id, None)
    score = Column(name="score", type=pa.float32(), meaning="score", writer="judge", nullable=True)
    late = ConsumerSpec(name="late", columns=("tokens",))
    scored = ConsumerSpec(name="scored", columns=("score",))
    before = table.spec
    table.alter(evolve(before, [score], [late, scored]))
    assert table.former_specs == [before]
    assert table.part_names == ["rollout", "actor", "judge"]
    assert (table.cursor("late").num_ready(), table.cursor("scored").num_ready()) == (1, 0)
    table.put(["b"], ["b"], 4)
    assert table.cursor("scored").num_ready() == 1
    table.put(["c"], ["c"], 1)
    for consumer in ("train", "late", "scored"):
        table.put(["c"], ["c"], 4)
        table.ack(consumer, take(table, consumer, 9).lease_id, None)
    assert not table.rows


def test_new_consumer_of_groups_takes_those_that_are_whole():
    """Groups of which a row has left are not for it; a table without groups cannot get such a consumer."""
    fifo = ConsumerSpec(name="fifo", columns=("tokens",))
    train = ConsumerSpec(name="train", columns=("tokens",), sampler="groups")
    table = make_table(consumers=(train, fifo), group_size=2)
    table.put(["a0", "a1", "b0"], ["a", "a", "b"], 1)
    table.ack("train", take(table, "train", 1).lease_id, None)
    table.ack("fifo", take(table, "fifo", 1).lease_id, None)
    late = ConsumerSpec(name="late", columns=("tokens",), sampler="groups")
    table.alter(evolve(table.spec, [], [late]))
    assert table.cursor("late").num_ready() == 0
    table.put(["b1"], ["b"], 1)
    assert uids_of(take(table, "late", 9)) == ["b0", "b1"]
    plain = make_table()
    with pytest.raises(
        InvalidRequestError, match="consumers of groups must be there when the table is created"
    ):
        plain.alter(evolve(plain.spec, [], [late]))
    assert plain.spec == make_table().spec
