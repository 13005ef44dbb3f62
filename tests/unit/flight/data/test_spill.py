"""Values that go to disk and come back."""

from __future__ import annotations

import fcntl
import shutil

import pyarrow as pa
import pytest

from flight.broker import Broker, ReadRequest, Wait
from flight.data.spill import RETRY_S, SpillDirectory
from flight.errors import DeadlineExceededError, InvalidRequestError
from flight.schema import Column, ConsumerSpec, TableSpec
from flight.state.ledger import TakeRequest
from tests.kit.clock import FakeClock

NOW = Wait(deadline=0.0)
ROW_BYTES = 100_000
TAKE = TakeRequest(consumer="c", max_rows=1, lease_s=1e6)


@pytest.fixture
def directory(tmp_path):
    """A spill directory that is removed at the end."""
    made = SpillDirectory(tmp_path / "spill")
    yield made
    made.close()


def open_broker(directory, **changes) -> Broker:
    """Return a broker with one table that holds three rows in memory."""
    broker = Broker(clock=FakeClock(), spill=directory)
    values = {"capacity_bytes": 10 * ROW_BYTES, "memory_bytes": 3 * ROW_BYTES + 1000, "spill": True} | changes
    column = Column(name="x", type=pa.binary(), meaning="bytes")
    consumer = ConsumerSpec(name="c", columns=("x",))
    spec = TableSpec(name="t", columns=(column,), consumers=(consumer,), **values)
    broker.create_table(spec, exist_ok=False)
    return broker


def put(broker, number):
    """Put one row."""
    value = bytes([number]) * ROW_BYTES
    batch = pa.record_batch({"uid": [f"r{number}"], "x": pa.array([value], pa.binary())})
    broker.put("t", batch, "", NOW)


def test_oldest_values_go_to_disk_and_come_back(directory):
    """Memory stays bounded; take and read find the values wherever they lie; the disk is free again at the end."""
    broker = open_broker(directory)
    for number in range(8):
        put(broker, number)
    stats = broker.stats("t")["t"]
    assert stats["bytes"] - stats["disk_bytes"] <= 3 * ROW_BYTES + 1000
    assert stats["disk_bytes"] >= 5 * ROW_BYTES
    values = broker.read("t", ReadRequest()).column("x").to_pylist()
    assert [value[0] for value in values] == list(range(8))
    assert [each.name for each in directory.path.iterdir()] == ["lock"]
    for number in range(8):
        answer = broker.take("t", TAKE, None, NOW)
        assert answer.table.column("x").to_pylist() == [bytes([number]) * ROW_BYTES]
        broker.ack("t", "c", answer.lease_id, None)
    stats = broker.stats("t")["t"]
    assert (stats["bytes"], stats["disk_bytes"]) == (0, 0)


def test_values_taken_stay_readable_when_their_rows_are_gone(directory):
    """The file lives as long as somebody looks into it, also after the directory is removed."""
    broker = open_broker(directory)
    for number in range(5):
        put(broker, number)
    answer = broker.take("t", TAKE, None, NOW)
    broker.truncate_table("t")
    directory.close()
    assert answer.table.column("x").to_pylist() == [bytes([0]) * ROW_BYTES]


def test_capacity_bounds_memory_and_disk_together(directory):
    """The tenth row does not fit: its producer waits."""
    broker = open_broker(directory)
    for number in range(9):
        put(broker, number)
    with pytest.raises(DeadlineExceededError, match="consumer 'c' is furthest behind with 9 rows to finish"):
        put(broker, 9)


def test_full_disk_makes_producers_wait_and_is_tried_again(directory):
    """Nothing is lost and nothing fails: memory is the limit until the disk takes something again."""
    broker = open_broker(directory)
    shutil.rmtree(directory.path)
    for number in range(4):
        put(broker, number)
    with pytest.raises(DeadlineExceededError) as caught:
        put(broker, 4)
    assert str(caught.value) == (
        "put into t: room for 1 rows and 100008 bytes must come before the deadline, got none in memory_bytes 301000, "
        "and the disk takes no more; consumer 'c' is furthest behind with 4 rows to finish"
    )
    directory.path.mkdir()
    broker.clock.advance(RETRY_S)
    put(broker, 4)
    put(broker, 5)
    assert broker.stats("t")["t"]["disk_bytes"] >= 3 * ROW_BYTES
    assert broker.read("t", ReadRequest()).num_rows == 6


def test_table_that_spills_needs_a_directory():
    """The refusal says how to start the server."""
    with pytest.raises(InvalidRequestError) as caught:
        open_broker(None)
    assert str(caught.value) == (
        "create_table t: spill must be false on a server without a directory for it, got true; "
        "start it with --spill-dir"
    )


def test_left_overs_of_dead_servers_are_removed(tmp_path):
    """Those of a living one are not: it holds its lock."""
    (tmp_path / "flight-dead").mkdir()
    (tmp_path / "flight-dead" / "lock").touch()
    (tmp_path / "flight-dead" / "rest.arrow").touch()
    (tmp_path / "flight-alive").mkdir()
    (tmp_path / "other").mkdir()
    with (tmp_path / "flight-alive" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        SpillDirectory(tmp_path).close()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["flight-alive", "other"]


def test_spill_directory_must_be_writable(tmp_path):
    """A file in its place is named."""
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequestError, match=r"spill-dir must be a directory to write into, got .*file"):
        SpillDirectory(tmp_path / "file")
