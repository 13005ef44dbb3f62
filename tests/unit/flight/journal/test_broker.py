"""Policies, groups, room and checkpoints of a broker with a journal, in one process."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest

from flight.broker import ReadRequest, Wait
from flight.data.spill import SpillDirectory
from flight.errors import DeadlineExceededError, InvalidRequestError, JournalFullError, UnavailableError
from flight.journal.config import JournalConfig
from flight.schema import Column, ConsumerSpec
from flight.state.ledger import TakeRequest
from tests.kit.clock import FakeClock
from tests.kit.journals import (
    NOW,
    GatedDisk,
    HastyDisk,
    SmallDisk,
    crashed,
    open_journal,
    plain_rows,
    plain_spec,
    state_of,
)
from tests.kit.queues import prompts_spec, rollouts_spec

FIVE = TakeRequest(consumer="reader", max_rows=5, lease_s=60.0)


def uids_of(broker) -> list[str]:
    """Return the rows that are there."""
    return broker.read("rows", ReadRequest(columns=[])).column("uid").to_pylist()


@pytest.mark.parametrize(("fsync", "num_syncs"), [("none", 0), ("interval", 0), ("batch", 3)])
def test_put_waits_for_what_its_table_asks(tmp_path, fsync, num_syncs):
    """Only `batch` waits for the disk; after a kill, which keeps what was written, all three have all rows."""
    disk = HastyDisk()
    broker = open_journal(tmp_path / "live", disk=disk, fsync_interval_s=1000.0)
    broker.create_table(plain_spec(fsync=fsync), exist_ok=False)
    broker.flush()
    before = disk.num_syncs
    for uid in "abc":
        broker.put("rows", plain_rows(uid), "", NOW)
    assert disk.num_syncs - before == num_syncs
    path = crashed(tmp_path / "live", tmp_path / "dead")
    broker.close()
    again = open_journal(path)
    assert uids_of(again) == ["a", "b", "c"]
    assert again.put("rows", plain_rows("b", "d"), "", NOW).row_ids == [1, 3]
    again.close()


def test_puts_that_come_together_share_a_sync(tmp_path):
    """While one sync is under way others are written; one more sync is enough for all of them."""
    disk = GatedDisk()
    broker = open_journal(tmp_path, disk=disk, fsync_interval_s=1000.0)
    broker.create_table(plain_spec(), exist_ok=False)
    before = disk.num_syncs
    disk.gate.clear()
    disk.has_come.clear()
    wait = Wait(deadline=broker.clock() + 20.0)
    puts = [
        threading.Thread(target=broker.put, args=("rows", plain_rows(f"u{n}"), "", wait)) for n in range(8)
    ]
    puts[0].start()
    assert disk.has_come.wait(20.0)
    for put in puts[1:]:
        put.start()
    while broker.journal_stats()["written"] < broker.position() or len(uids_of(broker)) < len(puts):
        puts[-1].join(0.01)
    disk.gate.set()
    for put in puts:
        put.join(20.0)
    assert disk.num_syncs - before == 2
    broker.close()


def test_put_whose_disk_is_too_slow_ends_by_its_deadline(tmp_path):
    """The row is made all the same; the repeated put waits for it again."""
    disk = GatedDisk()
    broker = open_journal(tmp_path, disk=disk, fsync_interval_s=1000.0)
    broker.create_table(plain_spec(), exist_ok=False)
    disk.gate.clear()
    disk.has_come.clear()
    first = threading.Thread(target=broker.put, args=("rows", plain_rows("a"), "", Wait(deadline=2000.0)))
    first.start()
    assert disk.has_come.wait(20.0)
    with pytest.raises(DeadlineExceededError, match="repeat the request to wait for it"):
        broker.put("rows", plain_rows("b"), "", NOW)
    disk.gate.set()
    first.join(20.0)
    assert broker.put("rows", plain_rows("b"), "", NOW).num_duplicates == 1
    assert uids_of(broker) == ["a", "b"]
    broker.close()


def test_rows_that_are_handed_out_are_durable(tmp_path):
    """Nobody holds a row that a crash could undo: a take waits as the put does."""
    disk = GatedDisk()
    broker = open_journal(tmp_path, disk=disk, fsync_interval_s=1000.0)
    broker.create_table(plain_spec(), exist_ok=False)
    disk.gate.clear()
    wait = Wait(deadline=broker.clock() + 20.0)
    put = threading.Thread(target=broker.put, args=("rows", plain_rows("a"), "", wait))
    answers = []
    take = threading.Thread(target=lambda: answers.append(broker.take("rows", FIVE, None, wait)))
    put.start()
    take.start()
    while broker.stats("rows")["rows"]["consumers"]["reader"]["leased"] == 0:
        put.join(0.01)
    take.join(0.05)
    assert answers == []
    disk.gate.set()
    put.join(20.0)
    take.join(20.0)
    assert answers[0].table.num_rows == 1
    broker.close()


def test_full_disk_refuses_puts_lets_acks_pass_and_recovers(tmp_path):
    """Puts are refused with a clear error, the reserve carries acks, and when there is room all goes on."""
    disk = SmallDisk()
    broker = open_journal(tmp_path / "live", disk=disk)
    broker.create_table(plain_spec(), exist_ok=False)
    broker.put("rows", plain_rows(*(f"a{n}" for n in range(9))), "", NOW)
    lease = broker.take("rows", FIVE, None, NOW)
    broker.flush()
    disk.left = 100
    with pytest.raises(JournalFullError, match="must have room, got: No space left on device"):
        broker.put("rows", plain_rows("b"), "", NOW)
    with pytest.raises(JournalFullError, match=r"a full disk under .*; finish rows"):
        broker.put("rows", plain_rows("c"), "", NOW)
    assert broker.journal_stats()["is_full"]
    dead = crashed(tmp_path / "live", tmp_path / "dead")
    disk.left = 1 << 40
    assert broker.ack("rows", "reader", lease.lease_id, None) == 5
    wait = Wait(deadline=broker.clock() + 60.0)
    assert broker.put("rows", plain_rows("b", "c"), "", wait).row_ids == [9, 10]
    assert not broker.journal_stats()["is_full"]
    broker.close()
    again = open_journal(tmp_path / "live")
    assert uids_of(again) == ["a5", "a6", "a7", "a8", "b", "c"]
    again.close()
    before = open_journal(dead)
    assert uids_of(before) == [f"a{n}" for n in range(9)]
    assert before.recovered.num_torn == 0
    before.close()


def test_put_that_the_disk_has_no_room_for_changes_nothing(tmp_path):
    """It is refused before the row is made, and goes in when there is room."""
    disk = SmallDisk()
    broker = open_journal(tmp_path, disk=disk)
    broker.create_table(plain_spec(), exist_ok=False)
    disk.free = 100
    with pytest.raises(
        JournalFullError, match=r"put into rows: the journal must have room for \d+ bytes before"
    ):
        broker.put("rows", plain_rows("a"), "", NOW)
    assert uids_of(broker) == []
    disk.free = 1 << 40
    assert broker.put("rows", plain_rows("a"), "", NOW).row_ids == [0]
    broker.close()


def test_broken_disk_refuses_every_change_from_then_on(tmp_path):
    """After a failed sync nobody knows what is on the disk; a later one would succeed and say nothing."""

    class BrokenDisk(HastyDisk):
        """A fake disk that breaks on demand."""

        is_broken = False

        def sync(self, descriptor: int) -> None:
            """Fail."""
            if self.is_broken:
                raise OSError(5, "Input/output error")

    disk = BrokenDisk()
    broker = open_journal(tmp_path, disk=disk)
    broker.create_table(plain_spec(), exist_ok=False)
    disk.is_broken = True
    with pytest.raises(UnavailableError, match="Input/output error; restart the server on a working disk"):
        broker.put("rows", plain_rows("a"), "", NOW)
    disk.is_broken = False
    with pytest.raises(UnavailableError, match="restart the server"):
        broker.put("rows", plain_rows("b"), "", NOW)
    assert broker.stats("rows")["rows"]["rows"] == 2
    broker.close()


def test_limit_makes_puts_wait_for_rows_to_leave(tmp_path):
    """Twenty times the limit goes through; a put that finds no room by its deadline is told why."""
    broker = open_journal(tmp_path, limit_bytes=16 << 20, segment_bytes=1 << 20)
    broker.create_table(plain_spec(capacity_bytes=1 << 40), exist_ok=False)
    value = "x" * (2 << 20)
    most = 0
    for number in range(40):
        wait = Wait(deadline=broker.clock() + 60.0)
        broker.put("rows", pa.record_batch({"uid": [f"u{number}"], "x": [value]}), "", wait)
        most = max(most, sum(path.stat().st_size for path in tmp_path.glob("*.*")))
        if number % 2:
            broker.ack("rows", "reader", broker.take("rows", FIVE, None, NOW).lease_id, None)
    assert most <= 16 << 20
    too_much = pa.record_batch({"uid": [f"v{number}" for number in range(8)], "x": [value] * 8})
    with pytest.raises(JournalFullError, match=r"got \d+ of limit_bytes 16777216 in use; finish rows"):
        broker.put("rows", too_much, "", NOW)
    assert broker.journal_stats()["checkpoints"] > 0
    broker.close()


def test_recovery_replays_what_came_after_the_checkpoint_only(tmp_path):
    """Three thousand rows that came and went leave neither files nor work behind."""
    broker = open_journal(tmp_path, segment_bytes=65536)
    broker.create_table(plain_spec(), exist_ok=False)
    for number in range(30):
        broker.put("rows", plain_rows(*(f"u{number}-{each}" for each in range(100))), "", NOW)
        lease = broker.take("rows", TakeRequest(consumer="reader", max_rows=100), None, NOW)
        if number != 15:
            broker.ack("rows", "reader", lease.lease_id, None)
    before = sum(path.stat().st_size for path in tmp_path.glob("*.log"))
    broker.checkpoint()
    after = sum(path.stat().st_size for path in [*tmp_path.glob("*.log"), *tmp_path.glob("*.rows")])
    assert after < before / 8
    expected = state_of(broker)["rows"]["values"]
    broker.close()
    again = open_journal(tmp_path)
    assert again.recovered.num_replayed == 0
    assert state_of(again)["rows"]["values"] == expected
    assert len(expected) == 100
    assert again.put("rows", plain_rows("u0-0", "u29-99"), "", NOW).num_duplicates == 2
    again.close()


def test_rows_of_many_parts_survive_moving(tmp_path):
    """Each writer's part of a row is found again, wherever compaction put it."""
    columns = (
        Column(name="x", type=pa.string(), meaning="m", writer="one"),
        Column(name="y", type=pa.int64(), meaning="m", writer="two"),
    )
    broker = open_journal(tmp_path)
    reader = ConsumerSpec(name="reader", columns=("x", "y"))
    broker.create_table(plain_spec(columns=columns, consumers=(reader,)), exist_ok=False)
    uids = [f"u{number}" for number in range(10)]
    broker.put("rows", plain_rows(*uids), "one", NOW)
    broker.put("rows", pa.record_batch({"uid": uids[::-2], "y": range(5)}), "two", NOW)
    broker.checkpoint(sparse=1.0)
    broker.put("rows", pa.record_batch({"uid": uids[::2], "y": range(5, 10)}), "two", NOW)
    lease = broker.take("rows", FIVE, None, NOW)
    broker.ack("rows", "reader", lease.lease_id, None)
    expected = broker.read("rows", ReadRequest()).to_pylist()
    for _ in range(2):
        broker.checkpoint(sparse=1.0)
        broker.close()
        broker = open_journal(tmp_path)
        assert broker.read("rows", ReadRequest()).to_pylist() == expected
    broker.close()


def test_ages_count_on_while_no_server_runs(tmp_path):
    """A row that has become too old meanwhile leaves when the next server starts, whatever its clock shows."""
    wall = FakeClock()
    broker = open_journal(tmp_path, wall)
    broker.create_table(plain_spec(max_age_s=100.0), exist_ok=False)
    broker.put("rows", plain_rows("old"), "", NOW)
    wall.advance(60.0)
    broker.put("rows", plain_rows("new"), "", NOW)
    broker.close()
    wall.advance(50.0)
    again = open_journal(tmp_path, FakeClock(5.0), wall=wall)
    assert uids_of(again) == ["new"]
    again.clock.advance(60.0)
    assert uids_of(again) == []
    again.close()


def test_values_that_were_spilled_come_back(tmp_path):
    """What lay in the spill directory is in the journal, too; a server without such a directory is refused."""
    spec = plain_spec(spill=True, memory_bytes=4096)
    values = {"uid": [f"u{number}" for number in range(8)], "x": [str(number) * 4096 for number in range(8)]}
    disk = SpillDirectory(tmp_path / "s")
    broker = open_journal(tmp_path / "j", spill=disk)
    broker.create_table(spec, exist_ok=False)
    for number in range(8):
        row = {name: column[number : number + 1] for name, column in values.items()}
        broker.put("rows", pa.record_batch(row), "", NOW)
    broker.close()
    with pytest.raises(InvalidRequestError, match="start it with --spill-dir"):
        open_journal(tmp_path / "j")
    again = open_journal(tmp_path / "j", spill=disk)
    assert again.read("rows", ReadRequest(columns=["x"])).column("x").to_pylist() == values["x"]
    assert again.stats("rows")["rows"]["disk_bytes"] > 0
    again.close()
    disk.close()


def test_config_refuses_what_cannot_work():
    """Limits are checked when they are read, not when the disk is full."""
    with pytest.raises(InvalidRequestError, match="limit_bytes must be at least 16777216, got 5"):
        JournalConfig(directory="d", limit_bytes=5)


@pytest.mark.parametrize("is_condensed", [False, True])
def test_version_of_work_that_is_gone_on_with_outlives_the_server(tmp_path, is_condensed):
    """Read from the log, and from a checkpoint: the next ticket counts from where the work was begun."""
    broker = open_journal(tmp_path / "live")
    for spec in (rollouts_spec(1), prompts_spec()):
        broker.create_table(spec, exist_ok=False)
    broker.put("prompts", pa.RecordBatch.from_pydict({"uid": ["p0"], "text": ["?"]}), "", NOW)
    request = TakeRequest(consumer="rollout", max_rows=1, policy_version=0)
    lease_id = broker.take("prompts", request, None, NOW).lease_id
    broker.announce("rollouts", 1)
    broker.nack("prompts", "rollout", lease_id, ["p0"], reason="update", requeue=True, policy_version=0)
    if is_condensed:
        broker.checkpoint()
    broker.flush()
    path = crashed(tmp_path / "live", tmp_path / "dead")
    broker.close()
    again = open_journal(path)
    again.take("prompts", TakeRequest(consumer="rollout", max_rows=1, policy_version=1), None, NOW)
    gate = state_of(again)["rollouts"]["gate"]
    assert gate["begun"] == {"p0": 0}
    assert gate["tickets"] == [{"group_id": "p0", "num_rows": 2, "version": 0}]
    again.close()
