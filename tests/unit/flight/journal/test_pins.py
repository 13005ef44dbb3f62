"""Kept checkpoints: two phases, crashes between them, room on disk, and what a rewind does to those who are at work."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest

from flight.broker import ReadRequest, Wait
from flight.errors import (
    InvalidRequestError,
    JournalDamagedError,
    JournalFullError,
    LeaseLostError,
    TableNotFoundError,
)
from flight.journal.format import Kind, read_frames
from flight.journal.fsck import fsck
from flight.journal.pins import MAX_PINS
from flight.schema import Column
from flight.state.ledger import TakeRequest
from tests.kit.clock import FakeClock
from tests.kit.journals import (
    NOW,
    SmallDisk,
    StatelessDisk,
    crashed,
    media_rows,
    media_specs,
    open_journal,
    plain_rows,
    plain_spec,
    prompt_rows,
    references_of,
    state_of,
)

TWO = TakeRequest(consumer="reader", max_rows=2, lease_s=60.0)


def opened(path, **options):
    """Return a broker with rows a to d, of which a and b are acked."""
    broker = open_journal(path, **options)
    broker.create_table(plain_spec(), exist_ok=False)
    broker.put("rows", plain_rows("a", "b", "c", "d"), "", NOW)
    broker.ack("rows", "reader", broker.take("rows", TWO, None, NOW).lease_id, None)
    return broker


def uids_of(broker) -> list[str]:
    """Return the rows that are there."""
    return broker.read("rows", ReadRequest(columns=[])).column("uid").to_pylist()


def test_rewind_brings_back_what_was_finished_since(tmp_path):
    """Rows acked since are delivered again, rows put since are gone, and their numbers are not given twice."""
    broker = opened(tmp_path)
    broker.prepare("step 1")
    late = broker.take("rows", TWO, None, NOW)
    broker.ack("rows", "reader", late.lease_id, None)
    assert broker.put("rows", plain_rows("e"), "", NOW).row_ids == [4]
    lost = broker.take("rows", TWO, None, NOW)
    broker.rewind("step 1")
    assert uids_of(broker) == ["c", "d"]
    with pytest.raises(LeaseLostError):
        broker.ack("rows", "reader", lost.lease_id, None)
    with pytest.raises(LeaseLostError):
        broker.ack("rows", "reader", late.lease_id, None)
    again = broker.take("rows", TWO, None, NOW)
    assert again.lease_id not in (late.lease_id, lost.lease_id)
    assert again.table.select(["uid", "x", "attempt"]).to_pylist() == [
        {"uid": uid, "x": f"value of {uid}", "attempt": 1} for uid in "cd"
    ]
    assert broker.put("rows", plain_rows("e", "a"), "", NOW).row_ids == [5, 0]
    broker.close()


@pytest.mark.parametrize("is_durable", [False, True])
def test_files_of_the_trainer_decide_after_a_crash_between_prepare_and_commit(tmp_path, is_durable):
    """A prepared checkpoint waits for its owner's word, whatever the server had time to do."""
    broker = opened(tmp_path / "live")
    broker.prepare("step 1")
    broker.commit("step 1")
    broker.ack("rows", "reader", broker.take("rows", TWO, None, NOW).lease_id, None)
    broker.put("rows", plain_rows("e"), "", NOW)
    broker.prepare("step 2")
    broker.put("rows", plain_rows("f"), "", NOW)
    again = open_journal(crashed(tmp_path / "live", tmp_path / "dead"))
    broker.close()
    assert [(each["checkpoint_id"], each["status"]) for each in again.kept_checkpoints()] == [
        ("step 1", "committed"),
        ("step 2", "prepared"),
    ]
    if is_durable:
        again.commit("step 2")
        again.rewind("step 2")
        assert uids_of(again) == ["e"]
    else:
        assert again.release("step 2")
        again.rewind("step 1")
        assert uids_of(again) == ["c", "d"]
    assert not again.release("step 3")
    again.close()


def test_crash_between_a_rewind_and_its_checkpoint_is_replayed(tmp_path):
    """The decision names the kept checkpoint, which stays until a later state is written."""
    disk = StatelessDisk()
    broker = opened(tmp_path / "live", disk=disk)
    broker.prepare("one")
    broker.ack("rows", "reader", broker.take("rows", TWO, None, NOW).lease_id, None)
    disk.without = True
    broker.rewind("one")
    assert broker.put("rows", plain_rows("e"), "", NOW).row_ids == [4]
    with pytest.raises(OSError, match="Input/output"):
        broker.release("one")
    expected = state_of(broker)
    path = crashed(tmp_path / "live", tmp_path / "dead")
    broker.close()
    assert fsck(path).rows == {"rows": 3}
    again = open_journal(path)
    assert again.recovered.last_rewind
    assert state_of(again) == expected
    again.release("one")
    again.close()
    last = open_journal(path)
    assert (last.recovered.last_rewind, last.kept_checkpoints()) == (0, [])
    assert state_of(last) == expected
    last.close()


def test_kept_rows_stay_through_compaction_and_go_with_their_checkpoint(tmp_path):
    """The files of a kept checkpoint are neither emptied nor deleted, and count for the limit."""
    broker = open_journal(tmp_path, limit_bytes=16 << 20)
    broker.create_table(plain_spec(capacity_bytes=1 << 40), exist_ok=False)
    value = "x" * (9 << 20)
    broker.put("rows", pa.record_batch({"uid": ["a"], "x": [value]}), "", NOW)
    broker.prepare("one")
    broker.ack("rows", "reader", broker.take("rows", TWO, None, NOW).lease_id, None)
    broker.checkpoint(sparse=1.0)
    other = pa.record_batch({"uid": ["b"], "x": [value]})
    with pytest.raises(JournalFullError, match="release a checkpoint"):
        broker.put("rows", other, "", NOW)
    broker.rewind("one")
    assert broker.read("rows", ReadRequest()).column("x").to_pylist() == [value]
    broker.truncate_table("rows")
    broker.release("one")
    assert broker.put("rows", other, "", Wait(deadline=broker.clock() + 60.0)).row_ids == [1]
    broker.close()


def test_checkpoint_that_the_disk_has_no_room_for_is_refused_and_leaves_nothing(tmp_path):
    """The queue goes on as if nobody had asked."""
    disk = SmallDisk()
    broker = opened(tmp_path, disk=disk)
    broker.flush()
    disk.left = 100
    with pytest.raises(JournalFullError, match="release checkpoints"):
        broker.prepare("one")
    disk.left = 1 << 40
    assert broker.kept_checkpoints() == []
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".prepared", ".draft")]
    broker.prepare("one")
    broker.close()


def test_names_of_checkpoints_are_checked_and_never_paths(tmp_path):
    """Any text is a name; a committed one is not overwritten, and there is a bound."""
    broker = opened(tmp_path / "live")
    for _ in range(2):
        broker.prepare("../../etc/passwd\0")
    broker.commit("../../etc/passwd\0")
    broker.commit("../../etc/passwd\0")
    assert [path.name for path in tmp_path.iterdir()] == ["live"]
    with pytest.raises(InvalidRequestError, match="must not be that of a committed checkpoint"):
        broker.prepare("../../etc/passwd\0")
    with pytest.raises(InvalidRequestError, match="must have 1 to 256 characters, got 0"):
        broker.prepare("")
    with pytest.raises(
        InvalidRequestError, match=r"checkpoint_id must be one of .*, got 'other'; prepare it first"
    ):
        broker.rewind("other")
    with pytest.raises(InvalidRequestError, match="prepare it first"):
        broker.commit("other")
    for number in range(MAX_PINS - 1):
        broker.prepare(str(number))
    with pytest.raises(InvalidRequestError, match="at most 64, got one more; release some"):
        broker.prepare("one more")
    broker.close()


def test_waiting_calls_see_the_state_after_a_rewind(tmp_path):
    """A take that waits gets rows that are back; one on a table that is gone is told so."""
    broker = opened(tmp_path)
    broker.prepare("one")
    broker.create_table(plain_spec(name="later"), exist_ok=False)
    broker.ack("rows", "reader", broker.take("rows", TWO, None, NOW).lease_id, None)
    wait = Wait(deadline=broker.clock() + 60.0)
    found: dict[str, object] = {}

    def take(name: str) -> None:
        try:
            found[name] = broker.take(name, TWO, None, wait).table.column("uid").to_pylist()
        except TableNotFoundError as error:
            found[name] = type(error)

    threads = [threading.Thread(target=take, args=(name,)) for name in ("rows", "later")]
    for thread in threads:
        thread.start()
    while broker._num_waiting < 2:
        threads[0].join(0.01)
    broker.rewind("one")
    for thread in threads:
        thread.join(20.0)
    assert found == {"rows": ["c", "d"], "later": TableNotFoundError}
    broker.close()


def test_damaged_checkpoint_is_refused_and_told_by_fsck(tmp_path):
    """Nothing changes; the queue itself is sound."""
    broker = opened(tmp_path)
    broker.prepare("one")
    broker.close()
    [path] = tmp_path.glob("*.prepared")
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    again = open_journal(tmp_path)
    path.write_bytes(data)
    before = state_of(again)
    with pytest.raises(JournalDamagedError, match=path.name):
        again.rewind("one")
    assert state_of(again) == before
    again.close()
    report = fsck(tmp_path)
    assert report.is_sound
    assert "must be as it was written" in report.kept[path.name]
    last = open_journal(tmp_path)
    assert last.kept_checkpoints() == []
    last.close()


def test_rewind_counts_references_again(tmp_path):
    """Media that went since are back with the rows that refer to them."""
    clock = FakeClock()
    broker = open_journal(tmp_path, clock)
    for spec in media_specs():
        broker.create_table(spec, exist_ok=False)
    broker.put("media", media_rows("a", "b"), "", NOW)
    broker.put("prompts", prompt_rows(p0=["a"]), "preprocess", NOW)
    broker.ack("media", "viewer", None, ["a"])
    before = references_of(broker, "media")
    broker.prepare("one")
    broker.ack("prompts", "reader", broker.take("prompts", TWO, None, NOW).lease_id, None)
    assert broker.missing("media", ["a", "b"]) == ["a"]
    clock.advance(30.0)
    broker.rewind("one")
    assert references_of(broker, "media") == before
    clock.advance(30.0)
    assert broker.missing("media", ["a", "b"]) == []
    broker.ack("prompts", "reader", broker.take("prompts", TWO, None, NOW).lease_id, None)
    assert broker.missing("media", ["a", "b"]) == ["a"]
    broker.close()


def test_put_that_waits_while_its_column_goes_is_refused(tmp_path):
    """A batch is never kept in a table that it does not fit."""
    broker = open_journal(tmp_path)
    broker.create_table(plain_spec(capacity_rows=1), exist_ok=False)
    broker.prepare("one")
    column = Column(name="note", type=pa.string(), meaning="a note", writer="judge", nullable=True)
    broker.alter_table("rows", [column], [])
    broker.put("rows", plain_rows("a"), "", NOW)
    batch = pa.record_batch({"uid": ["b"], "note": ["n"]})
    errors: list[Exception] = []

    def put() -> None:
        try:
            broker.put("rows", batch, "judge", Wait(deadline=broker.clock() + 60.0))
        except TableNotFoundError as error:
            errors.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    while not broker._num_waiting:
        thread.join(0.01)
    broker.rewind("one")
    thread.join(20.0)
    assert "the table must stay the same until the put is done" in str(errors[0])
    assert uids_of(broker) == []
    broker.close()


@pytest.mark.parametrize("is_before", [False, True])
def test_repair_keeps_the_checkpoints_that_are_whole(tmp_path, is_before):
    """Damage after a kept checkpoint does not concern it: the repaired queue goes back to it as if nothing had been."""
    broker = opened(tmp_path)
    broker.put("rows", plain_rows("e"), "", NOW)
    expected = uids_of(broker)
    broker.prepare("one")
    broker.commit("one")
    for uid in "fgh":
        broker.put("rows", plain_rows(uid), "", NOW)
    broker.close()
    path = sorted(tmp_path.glob("*.log"))[0 if is_before else -1]
    frames = [each for each in read_frames(memoryview(path.read_bytes())) if each.kind is Kind.PUT]
    data = bytearray(path.read_bytes())
    data[frames[0].end - 80] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalDamagedError, match="damaged place"):
        open_journal(tmp_path)
    assert fsck(tmp_path, repair=True).is_repaired
    assert (tmp_path / "damaged-1" / path.name).read_bytes() == data
    again = open_journal(tmp_path)
    if is_before:
        assert again.kept_checkpoints() == []
    else:
        again.put("rows", plain_rows("i"), "", NOW)
        again.rewind("one")
        assert uids_of(again) == expected
        again.checkpoint(sparse=1.0)
    again.close()
    last = open_journal(tmp_path)
    assert is_before or uids_of(last) == expected
    last.close()
