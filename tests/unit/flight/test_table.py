"""The life of rows in one table, time given by hand."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flight.errors import CapacityError, InvalidRequestError, LeaseLostError, TableSealedError
from flight.schema import Column, ConsumerSpec, TableSpec
from flight.state import rows as rows_module
from flight.table import TableState


def make_table(**changes) -> TableState:
    """Return a table with two parts and three consumers: train (first part), record (both), media (keyed)."""
    values = {
        "name": "rollouts",
        "columns": (
            Column(name="tokens", type=pa.string(), meaning="tokens", writer="rollout"),
            Column(name="advantage", type=pa.float32(), meaning="advantage", writer="actor"),
        ),
        "consumers": (
            ConsumerSpec(name="train", columns=("tokens",)),
            ConsumerSpec(name="record", columns=("tokens", "advantage")),
            ConsumerSpec(name="media", columns=(), sampler="keyed"),
        ),
        "max_attempts": 2,
    }
    return TableState(TableSpec(**values | changes))


def grouped(**changes) -> TableState:
    """Return a table whose only consumer takes whole groups of two."""
    train = ConsumerSpec(name="train", columns=("tokens",), sampler="groups")
    return make_table(consumers=(train,), group_size=2, **changes)


def take(table: TableState, consumer: str, num_units: int, now: float = 0.0, lease_s: float = 10.0):
    """Lease up to `num_units` units."""
    cursor = table.cursor(consumer)
    units = [unit for _ in range(num_units) if (unit := cursor.pop()) is not None]
    return cursor.lease(units, member="me", version=0, deadline=now + lease_s)


def uids_of(lease) -> list[str]:
    """Return the uids of a lease in the order of delivery."""
    return [row.uid for row in lease.rows()]


def test_table_numbers_rows_and_ignores_repeats():
    """A repeated uid keeps its row_id and is counted as a duplicate."""
    table = make_table()
    assert table.put(["a", "b"], ["a", "b"], 1).row_ids == [0, 1]
    again = table.put(["b", "c"], ["b", "c"], 1)
    assert again.row_ids == [1, 2]
    assert again.new_parts == [0, 1]
    assert again.num_duplicates == 1


def test_table_shows_a_row_once_all_needed_parts_are_there():
    """The recorder waits for the trainer's part, the trainer does not."""
    table = make_table()
    table.put(["a"], ["a"], 1)
    assert (table.cursor("train").num_ready(), table.cursor("record").num_ready()) == (1, 0)
    table.put(["a"], ["a"], 2)
    assert (table.cursor("train").num_ready(), table.cursor("record").num_ready()) == (1, 1)


def test_table_retires_a_row_when_every_consumer_is_finished():
    """The row leaves memory with the last ack; its uid is still known."""
    table = make_table()
    table.put(["a"], ["a"], 3)
    table.ack("train", take(table, "train", 1).lease_id, None)
    table.ack("record", take(table, "record", 1).lease_id, None)
    assert table.retired == []
    assert table.ack("media", None, ["a", "unknown"]) == 1
    assert table.retired == [0]
    assert not table.rows
    assert table.put(["a"], ["a"], 3).num_duplicates == 1


def test_table_forgets_retired_uids_after_a_bounded_while(monkeypatch):
    """Old uids are forgotten first; their repeat is a new row with a new number."""
    monkeypatch.setattr(rows_module, "RETIRED_UIDS_KEPT", 1)
    table = make_table(consumers=(ConsumerSpec(name="train", columns=()),))
    table.put(["a", "b"], ["a", "b"], 1)
    table.ack("train", take(table, "train", 2).lease_id, None)
    assert table.put(["a", "b"], ["a", "b"], 1).row_ids == [2, 1]


def test_lease_expires_and_its_rows_come_again_in_their_old_place():
    """Redelivery counts attempts and keeps the order."""
    table = make_table()
    table.put(["a", "b", "c"], ["a", "b", "c"], 1)
    lost = take(table, "train", 2, now=0.0, lease_s=10.0)
    assert table.next_expiry() == 10.0
    assert table.expire(9.9) == 0
    assert table.expire(10.0) == 1
    again = take(table, "train", 3, now=10.0)
    assert uids_of(again) == ["a", "b", "c"]
    assert [unit.attempts for unit in again.units.values()] == [2, 2, 1]
    with pytest.raises(
        LeaseLostError, match="must be live, got 'rollouts-train-1', which is unknown or has expired"
    ):
        table.ack("train", lost.lease_id, None)


def test_lease_renewed_in_time_does_not_expire():
    """Renewal moves the deadline; the old one no longer counts."""
    table = make_table()
    table.put(["a"], ["a"], 1)
    lease = take(table, "train", 1, lease_s=10.0)
    table.cursor("train").renew(lease.lease_id, 25.0)
    assert table.expire(20.0) == 0
    assert table.expire(25.0) == 1


def test_row_tried_too_often_becomes_a_dead_letter():
    """After max_attempts deliveries a row is finished for its consumer, with the reason."""
    table = make_table()
    table.put(["a"], ["a"], 1)
    table.nack("train", take(table, "train", 1).lease_id, None, reason="cannot decode")
    table.nack("train", take(table, "train", 1).lease_id, None, reason="cannot decode")
    assert table.cursor("train").num_ready() == 0
    assert table.dead_letters == [("a", "train", "tried 2 times, at last: cannot decode")]
    assert table.cursor("train").counts["dead"] == 1


def test_nack_without_requeue_skips_and_keyed_consumers_do_not_hold_the_row():
    """What a taking consumer gave up is not kept for those that only ask by uid."""
    table = make_table()
    table.put(["a"], ["a"], 3)
    table.nack("train", take(table, "train", 1).lease_id, None, reason="broken", requeue=False)
    table.ack("record", take(table, "record", 1).lease_id, None)
    assert table.retired == [0]


def test_ack_is_idempotent_and_may_name_some_rows():
    """A part of a lease can be acked; repeating the ack of a finished lease returns its total."""
    table = make_table()
    table.put(["a", "b", "c"], ["a", "b", "c"], 1)
    lease = take(table, "train", 3)
    assert table.ack("train", lease.lease_id, ["b"]) == 1
    assert table.ack("train", lease.lease_id, None) == 2
    assert table.ack("train", lease.lease_id, None) == 3
    with pytest.raises(LeaseLostError):
        table.ack("train", "no-such-lease", None)


@pytest.mark.parametrize(
    ("consumer", "lease_id", "uids", "message"),
    [
        (
            "who",
            "x",
            None,
            "table 'rollouts': consumer must be one of ['train', 'record', 'media'], got 'who'",
        ),
        (
            "train",
            None,
            ["a"],
            "table 'rollouts': ack and nack must name the lease_id that take returned, got none; only keyed consumers "
            "ack by uids alone",
        ),
        ("media", None, None, "table 'rollouts': a keyed ack must name uids, got none"),
        (
            "train",
            "rollouts-train-1",
            ["z"],
            "consumer 'train': uids must be rows of lease 'rollouts-train-1', got ['z']",
        ),
    ],
)
def test_ack_refuses_what_is_not_the_callers(consumer, lease_id, uids, message):
    """Each refusal says what would have been right."""
    table = make_table()
    table.put(["a"], ["a"], 1)
    take(table, "train", 1)
    with pytest.raises(InvalidRequestError) as caught:
        table.ack(consumer, lease_id, uids)
    assert str(caught.value) == message


def test_groups_are_delivered_whole_and_oldest_first():
    """A group is ready when its last row is; the other consumers' order does not matter."""
    table = grouped()
    table.put(["a0", "b0", "c0"], ["a", "b", "c"], 1)
    table.put(["b1"], ["b"], 1)
    table.put(["a1"], ["a"], 1)
    assert uids_of(take(table, "train", 5)) == ["a0", "a1", "b0", "b1"]


def test_groups_are_acked_whole():
    """Half a group cannot be finished."""
    table = grouped()
    table.put(["a0", "a1"], ["a", "a"], 1)
    lease = take(table, "train", 1)
    with pytest.raises(InvalidRequestError, match="uids must name whole groups of 2 rows, got 1 rows"):
        table.ack("train", lease.lease_id, ["a0"])
    assert table.ack("train", lease.lease_id, ["a0", "a1"]) == 2


def test_open_groups_hold_room_for_their_rest():
    """A table full of open groups still takes the rows that complete them, and no new group."""
    table = grouped(capacity_rows=4)
    assert table.room_needed(["a0", "b0"], ["a", "b"]) == 4
    table.put(["a0", "b0"], ["a", "b"], 1)
    assert table.room == 0
    assert table.room_needed(["a1"], ["a"]) == 0
    assert table.room_needed(["c0"], ["c"]) == 2
    table.put(["a1"], ["a"], 1)
    assert table.room == 0
    table.ack("train", take(table, "train", 1).lease_id, None)
    assert table.room == 2


def test_put_refuses_what_can_never_fit():
    """Too large a batch, too large a group and a uid twice are refused before anything changes."""
    table = grouped(capacity_rows=2)
    with pytest.raises(
        CapacityError, match="at most capacity_rows 2 rows, got 4; cut the batch or raise the capacity"
    ):
        table.room_needed(["a0", "b0"], ["a", "b"])
    with pytest.raises(
        InvalidRequestError, match="group 'a' must have 2 rows, got 3; set group_id of each row"
    ):
        table.room_needed(["a0", "a1", "a2"], ["a", "a", "a"])
    with pytest.raises(InvalidRequestError, match="uid must be unique inside a batch, got 'a0' twice"):
        table.room_needed(["a0", "a0"], ["a", "a"])


def test_seal_ends_a_table_as_an_event():
    """A consumer is at the end once nothing is ready, leased or able to become ready."""
    table = make_table()
    table.put(["a"], ["a"], 1)
    table.seal()
    train, record = table.cursor("train"), table.cursor("record")
    lease = take(table, "train", 1)
    assert not table.is_exhausted(train)
    table.ack("train", lease.lease_id, None)
    assert table.is_exhausted(train)
    assert not table.is_exhausted(record)
    table.put(["a"], ["a"], 2)
    with pytest.raises(TableSealedError, match="new rows must come before the seal, got 1 after it"):
        table.room_needed(["b"], ["b"])


def test_seal_with_expected_rows_waits_for_them():
    """Until they are there the table is open; beyond them it is not."""
    table = make_table()
    table.put(["a"], ["a"], 1)
    table.seal(2)
    assert not table.is_closed
    with pytest.raises(
        TableSealedError, match="rows must be at most the expected 2, got 2 more than the 1 that came"
    ):
        table.room_needed(["b", "c"], ["b", "c"])
    table.put(["b"], ["b"], 1)
    assert table.is_closed
    with pytest.raises(
        InvalidRequestError, match="expected_rows must be at least the 2 rows put so far, got 1"
    ):
        table.seal(1)


def test_sealed_table_does_not_wait_for_groups_that_cannot_be_whole():
    """Rows of a group that will never be complete do not keep the consumer waiting."""
    table = grouped()
    table.put(["a0", "a1", "b0"], ["a", "a", "b"], 1)
    table.seal()
    cursor = table.cursor("train")
    assert table.no_more_coming(cursor)
    table.ack("train", take(table, "train", 1).lease_id, None)
    assert table.is_exhausted(cursor)


def test_take_does_not_get_slower_with_rows():
    """A take touches the rows that it returns and no others: the same number of queue steps whatever waits."""
    table = make_table()
    names = [f"r{index}" for index in range(20_000)]
    table.put(names, names, 1)
    cursor = table.cursor("train")
    lease = take(table, "train", 3)
    assert uids_of(lease) == ["r0", "r1", "r2"]
    assert len(cursor.leases) == 1
    assert cursor.num_ready() == 19_997
