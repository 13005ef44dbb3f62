"""Tables with values, one lock and a clock moved by hand."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa
import pytest

from flight.broker import Broker, ReadRequest, Wait
from flight.errors import (
    CapacityError,
    DeadlineExceededError,
    OverloadedError,
    SchemaMismatchError,
    TableNotFoundError,
    UnavailableError,
)
from flight.schema import Column, ConsumerSpec, TableSpec
from flight.state.ledger import TakeRequest
from tests.kit.clock import FakeClock
from tests.kit.queues import prompts_spec, rollouts_spec

NOW = Wait(deadline=0.0)
ACTOR = TakeRequest(consumer="actor", max_rows=4, member="actor-0", lease_s=10.0)


def rollouts(group: str, version: int = 0) -> pa.RecordBatch:
    """Return a group of two rows, answers of one and of five tokens."""
    return pa.record_batch(
        {
            "uid": [f"{group}/0", f"{group}/1"],
            "group_id": [group, group],
            "policy_version_start": pa.array([version, version], pa.int64()),
            "completion_token_ids": pa.array([[1], [1, 2, 3, 4, 5]], pa.list_(pa.int32())),
        }
    )


def open_broker(*specs: TableSpec) -> Broker:
    """Return a broker with tables and a clock that stands still."""
    broker = Broker(clock=FakeClock())
    for spec in specs:
        broker.create_table(spec, exist_ok=False)
    return broker


def test_take_returns_keys_and_the_consumers_columns():
    """Columns default to those that the consumer needs; nullable ones can be asked for and are null."""
    broker = open_broker(rollouts_spec())
    broker.put("rollouts", rollouts("g"), "rollout", NOW)
    answer = broker.take("rollouts", ACTOR, None, NOW)
    assert answer.status == "rows"
    assert answer.table.to_pydict() == {
        "row_id": [0, 1],
        "uid": ["g/0", "g/1"],
        "group_id": ["g", "g"],
        "attempt": [1, 1],
        "staleness": [0, 0],
        "policy_version_start": [0, 0],
        "completion_token_ids": [[1], [1, 2, 3, 4, 5]],
    }
    assert broker.take("rollouts", ACTOR, None, NOW).status == "empty"
    broker.clock.advance(10.0)
    again = broker.take("rollouts", ACTOR, ["media"], NOW)
    assert again.table.to_pydict()["attempt"] == [2, 2]
    assert again.table.schema.field("media").type == pa.binary()
    assert again.table.column("media").null_count == 2


def test_empty_answer_has_the_same_schema():
    """A reader need not ask whether there are rows before it looks at columns."""
    broker = open_broker(rollouts_spec())
    empty = broker.take("rollouts", ACTOR, None, NOW).table.schema
    broker.put("rollouts", rollouts("g"), "rollout", NOW)
    assert broker.take("rollouts", ACTOR, None, NOW).table.schema.equals(empty, check_metadata=True)


def test_parts_of_a_row_come_together_for_whoever_needs_both():
    """The recorder sees the tokens of the rollout beside the advantage of the actor."""
    broker = open_broker(rollouts_spec())
    broker.put("rollouts", rollouts("g"), "rollout", NOW)
    part = pa.record_batch({"uid": ["g/1"], "advantage": pa.array([0.5], pa.float32())})
    assert broker.put("rollouts", part, "actor", NOW).num_duplicates == 0
    assert broker.put("rollouts", part, "actor", NOW).num_duplicates == 1
    answer = broker.take("rollouts", TakeRequest(consumer="recorder", max_rows=9), None, NOW)
    assert answer.table.column("completion_token_ids").to_pylist() == [[1, 2, 3, 4, 5]]
    assert answer.table.column("advantage").to_pylist() == [0.5]


def test_first_part_must_have_the_policy_version():
    """A row of a table with a staleness bound cannot begin without it."""
    broker = open_broker(rollouts_spec())
    part = pa.record_batch({"uid": ["g/1"], "advantage": pa.array([0.5], pa.float32())})
    with pytest.raises(SchemaMismatchError) as caught:
        broker.put("rollouts", part, "actor", NOW)
    assert str(caught.value) == (
        "put into rollouts: the first part of a row must have policy_version_start, got columns ['advantage'] for a "
        "uid that is not in the table"
    )


def test_memory_is_freed_when_rows_retire():
    """Bytes go back to zero; reading finds nothing."""
    broker = open_broker(rollouts_spec(consumers=(rollouts_spec().consumers[0],)))
    broker.put("rollouts", rollouts("g"), "", NOW)
    rows, num_bytes = broker.size("rollouts")
    assert rows == 2
    assert num_bytes > 0
    answer = broker.take("rollouts", ACTOR, None, NOW)
    assert broker.ack("rollouts", "actor", answer.lease_id, None, 7) == 2
    assert broker.size("rollouts") == (0, 0)
    assert broker.read("rollouts", ReadRequest()).num_rows == 0
    assert broker.stats("rollouts")["rollouts"]["consumers"]["actor"]["last_step"] == 7


def test_read_looks_without_consuming():
    """First rows, last rows, rows by uid in the order asked for; nothing is leased."""
    broker = open_broker(prompts_spec(), rollouts_spec())
    names = [f"p{index}" for index in range(5)]
    broker.put("prompts", pa.record_batch({"uid": names, "text": names}), "", NOW)
    read = lambda **request: broker.read("prompts", ReadRequest(**request)).column("uid").to_pylist()  # noqa: E731
    assert read() == names
    assert read(max_rows=2) == ["p0", "p1"]
    assert read(max_rows=2, newest=True) == ["p3", "p4"]
    assert read(uids=["p4", "unknown", "p1", "p4"]) == ["p4", "p1"]
    assert broker.read("prompts", ReadRequest(columns=[])).column_names == ["row_id", "uid", "group_id"]
    assert broker.stats("prompts")["prompts"]["consumers"]["rollout"]["ready"] == 5


def test_full_table_makes_the_producer_wait_and_says_who_is_behind():
    """The deadline passes: the error has the need, the room and the slow consumer."""
    broker = open_broker(rollouts_spec(capacity_rows=4))
    broker.put("rollouts", rollouts("a"), "", NOW)
    broker.put("rollouts", rollouts("b"), "", NOW)
    broker.take("rollouts", ACTOR, None, NOW)
    with pytest.raises(DeadlineExceededError) as caught:
        broker.put("rollouts", rollouts("c"), "", NOW)
    assert str(caught.value) == (
        "put into rollouts: room for 2 rows and 52 bytes must come before the deadline, got 0 rows and 1073741720 "
        "bytes; consumer 'actor' is furthest behind with 4 rows to finish, 4 of them leased by ['actor-0']"
    )
    assert broker.size("rollouts")[0] == 4


def test_batch_larger_than_the_table_is_refused():
    """Waiting would not help."""
    broker = open_broker(rollouts_spec(capacity_bytes=40))
    with pytest.raises(CapacityError, match="one batch must be at most capacity_bytes 40, got 52"):
        broker.put("rollouts", rollouts("a"), "", NOW)


def test_dropped_completions_are_counted_by_length():
    """Dropping favours short answers: the histogram shows it."""
    broker = open_broker(rollouts_spec(0, "drop"))
    broker.put("rollouts", rollouts("g"), "", NOW)
    broker.announce("rollouts", 1)
    books = broker.stats("rollouts")["rollouts"]["staleness"]
    assert (books["dropped"], books["dropped_age"]) == (2, {"1": 2})
    assert books["dropped_completion_tokens_log2"] == {"1": 1, "3": 1}
    assert broker.size("rollouts") == (0, 0)


def test_failed_put_changes_nothing():
    """A batch is added whole or not at all."""
    broker = open_broker(rollouts_spec())
    bad = rollouts("g").set_column(1, "group_id", pa.array(["g", "h"]))
    broker.put("rollouts", rollouts("h"), "", NOW)
    before = broker.stats()
    with pytest.raises(ValueError, match="group 'h' must have 2 rows, got 3"):
        broker.put("rollouts", bad, "", NOW)
    assert broker.stats() == before


def test_waiting_calls_are_woken_by_what_they_wait_for():
    """Put wakes take, ack wakes put, announce wakes the entrance, drop and close end the wait with an error."""
    broker = Broker()
    broker.create_table(prompts_spec(), exist_ok=False)
    broker.create_table(rollouts_spec(capacity_rows=4), exist_ok=False)

    def wait() -> Wait:
        return Wait(deadline=broker.clock() + 20.0)

    def later(call):
        result = {}

        def run():
            try:
                result["value"] = call()
            except Exception as error:
                result["value"] = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread, result

    def value(waiting):
        waiting[0].join(10.0)
        assert not waiting[0].is_alive()
        return waiting[1]["value"]

    taking = later(lambda: broker.take("rollouts", ACTOR, None, wait()))
    broker.put("rollouts", rollouts("a"), "", wait())
    lease = value(taking)
    assert lease.status == "rows"
    broker.put("rollouts", rollouts("b"), "", wait())
    asking = later(lambda: broker.take("prompts", TakeRequest(consumer="rollout", max_rows=1), None, wait()))
    broker.put("prompts", pa.record_batch({"uid": ["p"], "text": ["q"]}), "", wait())
    broker.ack("rollouts", "actor", lease.lease_id, None)
    second = broker.take("rollouts", ACTOR, None, wait())
    broker.ack("rollouts", "actor", second.lease_id, None)
    broker.announce("rollouts", 1)
    assert value(asking).table.column("uid").to_pylist() == ["p"]
    putting = later(lambda: broker.put("rollouts", rollouts("c", 1), "", wait()))
    part = pa.record_batch({"uid": ["a/0", "a/1"], "advantage": pa.array([0.5, 0.5], pa.float32())})
    broker.put("rollouts", part, "actor", wait())
    record = broker.take("rollouts", TakeRequest(consumer="recorder", max_rows=2), None, wait())
    broker.ack("rollouts", "recorder", record.lease_id, None)
    assert value(putting).num_duplicates == 0
    dropped = later(lambda: broker.take("prompts", TakeRequest(consumer="rollout", max_rows=1), None, wait()))
    broker.drop_table("prompts")
    assert isinstance(value(dropped), TableNotFoundError)
    ended = later(lambda: broker.take("rollouts", TakeRequest(consumer="recorder", max_rows=1), None, wait()))
    broker.close()
    assert isinstance(value(ended), UnavailableError)


def test_too_many_waiting_calls_are_refused():
    """The limit protects the server's threads."""
    broker = Broker(max_waiting=0)
    broker.create_table(rollouts_spec(), exist_ok=False)
    with pytest.raises(OverloadedError, match="waiting calls must be at most 0, got one more"):
        broker.take("rollouts", ACTOR, None, Wait(deadline=broker.clock() + 5.0))


def test_wide_rows_of_many_producers_are_gathered_in_large_batches():
    """Rows put one by one travel together, fixed-shape tensors and all."""
    image = pa.fixed_shape_tensor(pa.uint8(), (8, 8))
    column = Column(name="image", type=image, meaning="pixels", nullable=True)
    broker = open_broker(
        TableSpec(name="t", columns=(column,), consumers=(ConsumerSpec(name="c", columns=("image",)),))
    )
    for index in range(50):
        pixels = pa.FixedShapeTensorArray.from_numpy_ndarray(np.full((1, 8, 8), index, np.uint8))
        broker.put("t", pa.record_batch({"uid": [f"u{index}"], "image": pixels}), "", NOW)
    table = broker.take("t", TakeRequest(consumer="c", max_rows=50), None, NOW).table
    assert table.column("image").num_chunks == 1
    assert table.column("image").chunk(0).to_numpy_ndarray()[:, 0, 0].tolist() == list(range(50))
