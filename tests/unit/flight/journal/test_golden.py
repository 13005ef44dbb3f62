"""Files of format 1 must be read for ever: what a server of that time wrote, with one decision of every kind.

They were written by `tests.kit.journal_golden`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from flight.broker import ReadRequest
from flight.journal import records as r
from flight.journal.format import Frame, Kind, read_frames
from flight.journal.fsck import fsck
from flight.journal.survey import map_file
from flight.journal.transfer import restore_directory
from tests.kit.clock import FakeClock
from tests.kit.journal_golden import CHECKPOINT_ID
from tests.kit.journals import open_journal, state_of

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "journal" / "v1"
CLOCK_S = 1061.0
"""The time of the fake clock when the files were written."""


def plain(broker) -> dict:
    """Return a broker's state as JSON gives it back, without the fields that came later."""
    return json.loads(json.dumps(state_of(broker), default=str))


def assert_holds(found, expected, where: str = "") -> None:
    """Everything that was there then must be there now; more may be."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            assert key in found, f"{where}/{key}"
            assert_holds(found[key], value, f"{where}/{key}")
    else:
        assert found == expected, where


def test_journal_of_format_1_is_read(tmp_path):
    """Checkpoint, moved rows and log: every table, row, count and book is what it was."""
    path = tmp_path / "journal"
    shutil.copytree(GOLDEN, path)
    report = fsck(path)
    assert (report.is_sound, report.torn, report.damaged) == (True, [], [])
    broker = open_journal(path, FakeClock(CLOCK_S))
    assert_holds(plain(broker), json.loads((GOLDEN / "state.json").read_text()))
    broker.close()


def test_snapshot_of_format_1_is_read(tmp_path):
    """The same queue, as one file."""
    assert (
        restore_directory(GOLDEN / "queue.snapshot", tmp_path / "journal") == fsck(golden_copy(tmp_path)).rows
    )
    broker = open_journal(tmp_path / "journal", FakeClock(CLOCK_S))
    expected = json.loads((GOLDEN / "state.json").read_text())
    for table in expected.values():
        del table["created"]
    assert_holds(plain(broker), expected)
    broker.close()


def golden_copy(tmp_path: Path) -> Path:
    """Return a copy of the files that may be locked."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "copy"))


def test_kept_checkpoint_of_format_1_is_read(tmp_path):
    """A server of today goes back to what one of that time kept."""
    broker = open_journal(golden_copy(tmp_path), FakeClock(CLOCK_S))
    assert [each["status"] for each in broker.kept_checkpoints()] == ["committed"]
    broker.rewind(CHECKPOINT_ID)
    uids = broker.read("rollouts", ReadRequest(columns=[])).column("uid").to_pylist()
    assert uids == ["p0/0", "p0/1", "p1/0", "p1/1"]
    assert broker.read("media", ReadRequest()).column("pixels").to_pylist() == [b"a", b"b", b"c"]
    broker.close()


def test_golden_log_has_decisions_of_all_kinds():
    """What a file does not hold it cannot guard."""
    kinds = {
        type(r.decode_decision(each.head))
        for log in GOLDEN.glob("*.log")
        for each in read_frames(map_file(log))
        if isinstance(each, Frame) and each.kind in (Kind.DECISION, Kind.PUT)
    }
    assert kinds == set(r.AnyDecision.__args__)
