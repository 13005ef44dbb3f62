"""A log that ends anywhere, or has a bad byte: what a crash explains is cut, all else is refused and repaired."""

from __future__ import annotations

import re
import shutil

import pytest

from flight.broker import ReadRequest, Wait
from flight.errors import InvalidRequestError, JournalDamagedError
from flight.journal.directory import JournalDirectory
from flight.journal.format import ALIGNMENT_BYTES, Frame, Kind, read_frames
from flight.journal.fsck import fsck
from flight.journal.survey import map_file
from flight.journal.transfer import restore_directory, snapshot_directory
from flight.state.ledger import TakeRequest
from tests.kit.journals import NOW, crashed, open_journal, plain_rows, plain_spec, state_of

FIVE = TakeRequest(consumer="reader", max_rows=5, lease_s=60.0)


def history(path, num_puts: int = 12, **settings) -> list[tuple[int, set[str], set[str]]]:
    """Put and ack, and close; returns (bytes of the log, uids put, uids acked) after each acknowledgement."""
    broker = open_journal(path, **settings)
    broker.create_table(plain_spec(), exist_ok=False)
    put: set[str] = set()
    acked: set[str] = set()
    steps = []
    for number in range(num_puts):
        broker.put("rows", plain_rows(f"a{number}", f"b{number}"), "", NOW)
        put |= {f"a{number}", f"b{number}"}
        if number % 3 == 2:
            answer = broker.take("rows", FIVE, None, NOW)
            broker.ack("rows", "reader", answer.lease_id, None)
            acked |= set(answer.table.column("uid").to_pylist())
        steps.append((log_of(path).stat().st_size, set(put), set(acked)))
    broker.close()
    return steps


def log_of(path):
    """Return the newest log."""
    return sorted(path.glob("*.log"))[-1]


def payload_end(each: Frame) -> int:
    """Return where a frame ends without the zeros behind its body."""
    return each.end - (-len(each.body) % ALIGNMENT_BYTES)


def uids_of(broker) -> set[str]:
    """Return the rows that are there."""
    return set(broker.read("rows", ReadRequest(columns=[])).column("uid").to_pylist())


def test_log_cut_at_any_byte_holds_what_was_acknowledged_before(tmp_path):
    """Every frame's edges and many bytes between: the acknowledged prefix is there, and what is there was put."""
    steps = history(tmp_path / "whole")
    (tmp_path / "whole" / "synced").unlink()  # As if the machine had gone before the mark was on disk.
    size = log_of(tmp_path / "whole").stat().st_size
    frames = [each for each in read_frames(map_file(log_of(tmp_path / "whole"))) if isinstance(each, Frame)]
    ends = [payload_end(each) for each in frames if each.kind in (Kind.DECISION, Kind.PUT)]
    edges = {each.end + step for each in frames for step in (-1, 0, 1)}
    for cut in sorted({*edges, *range(0, size, 211)} - {size + 1}):
        path = crashed(tmp_path / "whole", tmp_path / "cut")
        with log_of(path).open("r+b") as file:
            file.truncate(cut)
        broker = open_journal(path)
        done = [step for step in steps if step[0] <= cut]
        if not done:
            broker.close()
            continue
        _, put, acked = done[-1]
        there = uids_of(broker)
        assert put - acked <= there | set.union(*(step[2] for step in steps)), cut
        assert not there & acked, cut
        assert there <= steps[-1][1], cut
        assert broker.recovered.num_replayed == sum(end <= cut for end in ends), cut
        broker.close()


@pytest.mark.parametrize(
    "tail", [b"\0" * 4096, b"RxJ1" + b"\xff" * 300, b"x"], ids=["zeros", "half a frame", "x"]
)
def test_junk_at_the_end_is_cut_reported_and_counted(tmp_path, tail):
    """What a crash leaves behind the last decision is removed; the next start finds nothing of it."""
    history(tmp_path)
    with log_of(tmp_path).open("ab") as file:
        file.write(tail)
    report = fsck(tmp_path)
    assert (report.is_sound, len(report.torn), report.damaged) == (True, 1, [])
    broker = open_journal(tmp_path)
    assert broker.journal_stats()["torn_ends"] == 1
    assert broker.journal_stats()["torn_bytes"] == len(tail)
    broker.close()
    assert fsck(tmp_path).torn == []


def damaged(tmp_path, kind: Kind, which: int):
    """Make a history, flip one bit in the body or head of a frame, and return the directory and the frame."""
    history(tmp_path)
    path = log_of(tmp_path)
    frames = [each for each in read_frames(map_file(path)) if isinstance(each, Frame) and each.kind is kind]
    chosen = frames[which]
    data = bytearray(path.read_bytes())
    data[chosen.offset + 60] ^= 1
    path.write_bytes(data)
    return path.name, chosen


def test_flipped_bit_is_refused_with_its_place_and_the_way_out(tmp_path):
    """A server does not guess: it says where, and what to run."""
    name, bad = damaged(tmp_path, Kind.PUT, 4)
    expected = (
        f"journal: {tmp_path} must be as it was written, got 1 damaged place(s): {name} at byte {bad.offset}: the "
        f"checksum is wrong; copy the directory, then run `python -m flight fsck {tmp_path} --repair` to save what "
        "can be read"
    )
    with pytest.raises(JournalDamagedError, match=re.escape(expected)):
        open_journal(tmp_path)
    report = fsck(tmp_path)
    assert (report.is_sound, report.is_repaired) == (False, False)
    assert report.damaged == [f"{name} at byte {bad.offset}: the checksum is wrong"]
    with pytest.raises(JournalDamagedError):
        open_journal(tmp_path)


def test_repair_saves_everything_but_the_damaged_put(tmp_path):
    """Other rows are there with their old numbers, acked ones stay away, and the lost ones may be put again."""
    damaged(tmp_path, Kind.PUT, 4)
    report = fsck(tmp_path, repair=True)
    assert report.is_sound
    assert report.is_repaired
    assert (tmp_path / "damaged-1").is_dir()
    broker = open_journal(tmp_path)
    rows = broker.read("rows", ReadRequest()).to_pylist()
    assert {row["uid"] for row in rows}.isdisjoint({"a4", "b4", "a0", "b0"})
    assert {row["uid"]: row["row_id"] for row in rows}["b11"] == 23
    assert all(row["x"] == f"value of {row['uid']}" for row in rows)
    assert broker.put("rows", plain_rows("a4"), "", NOW).row_ids == [24]
    broker.close()
    assert fsck(tmp_path).is_sound


def test_damaged_last_decision_is_no_torn_end_once_it_was_on_disk(tmp_path):
    """The mark tells a crash from a disk that lost what it had."""
    damaged(tmp_path, Kind.DECISION, -1)
    assert not fsck(tmp_path).is_sound


def test_log_that_lost_its_end_is_refused(tmp_path):
    """A file that is cut between two frames looks whole; the mark says that it is not."""
    steps = history(tmp_path)
    with log_of(tmp_path).open("r+b") as file:
        file.truncate(steps[5][0])
    with pytest.raises(JournalDamagedError, match="which were on the disk, are missing at the end"):
        open_journal(tmp_path)


def test_missing_log_is_refused(tmp_path):
    """The numbers of decisions leave no gap."""
    history(tmp_path, segment_bytes=4096)
    logs = sorted(tmp_path.glob("*.log"))
    assert len(logs) > 2
    logs[1].unlink()
    with pytest.raises(JournalDamagedError, match="before it are missing"):
        open_journal(tmp_path)


def test_damaged_rows_of_a_checkpoint_take_only_themselves_along(tmp_path):
    """Values that are gone are not handed out as nulls."""
    history(tmp_path)
    broker = open_journal(tmp_path)
    broker.checkpoint(sparse=1.0)
    before = uids_of(broker)
    broker.close()
    path = sorted(tmp_path.glob("*.rows"))[-1]
    frames = [
        each for each in read_frames(map_file(path)) if isinstance(each, Frame) and each.kind is Kind.ROWS
    ]
    data = bytearray(path.read_bytes())
    data[frames[0].offset + 60] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalDamagedError, match=re.escape(path.name)):
        open_journal(tmp_path)
    assert fsck(tmp_path, repair=True).is_repaired
    broker = open_journal(tmp_path)
    assert 0 < len(before - uids_of(broker)) <= 2
    broker.close()


def test_directory_is_used_by_one_process(tmp_path):
    """Two servers on one journal would each overwrite the other's history."""
    broker = open_journal(tmp_path)
    with pytest.raises(InvalidRequestError, match="stop the server that uses it"):
        JournalDirectory(tmp_path)
    broker.close()
    JournalDirectory(tmp_path).close()


def test_snapshot_moves_a_queue(tmp_path):
    """A queue restored elsewhere is the same queue; its leases end as in a crash."""
    source = tmp_path / "source"
    history(source)
    snapshot_directory(source, tmp_path / "file")
    assert restore_directory(tmp_path / "file", tmp_path / "copy") == {"rows": 4}
    old, new = open_journal(source), open_journal(tmp_path / "copy")
    expected, found = state_of(old), state_of(new)
    expected["rows"].pop("created")
    found["rows"].pop("created")
    assert found == expected
    assert new.put("rows", plain_rows("a0", "new"), "", Wait(deadline=0.0)).row_ids == [0, 24]
    old.close()
    new.close()
    with pytest.raises(InvalidRequestError, match="must hold no journal yet"):
        restore_directory(tmp_path / "file", tmp_path / "copy")
    shutil.copy(tmp_path / "file", tmp_path / "cut")
    with (tmp_path / "cut").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(JournalDamagedError, match="must be a whole snapshot"):
        restore_directory(tmp_path / "cut", tmp_path / "other")
