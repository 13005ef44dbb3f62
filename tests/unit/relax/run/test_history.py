"""What befell a run, over several drivers."""

from __future__ import annotations

import pytest

from relax.run.history import RESTARTED, RESUMED, STARTED, WENT_BACK, History


def test_history_outlives_its_driver(tmp_path):
    """The next one knows the incarnation and counts on."""
    first = History(tmp_path)
    assert (first.incarnation, first.lines()) == (0, [])
    first.add(STARTED, "started", incarnation=0)
    first.add(RESTARTED, "rollout-0 was killed", service="rollout-0", number=1)
    first.add(RESUMED, "resumed after step 4", incarnation=1, step=4)
    second = History(tmp_path)
    second.add(RESTARTED, "rollout-0 was killed", service="rollout-0", number=1)
    assert second.incarnation == 1
    assert second.num_restarts() == {"rollout-0": 2}
    assert [text for _, text in second.lines()][2:] == ["resumed after step 4", "rollout-0 was killed"]


def test_line_that_a_crash_has_torn_is_cut_off(tmp_path):
    """What was whole stays, and what comes next is whole."""
    History(tmp_path).add(STARTED, "started", incarnation=0)
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(b'{"time": "2026')
    History(tmp_path).add(RESUMED, "resumed", incarnation=1)
    assert [event["event"] for event in History(tmp_path).events] == [STARTED, RESUMED]


def test_event_waits_for_a_disk_that_is_full(tmp_path):
    """A restart is written down with the next event; where the run goes on from must be on disk at once."""
    history = History(tmp_path)
    path = tmp_path / "history.jsonl"
    path.symlink_to("/dev/full")
    history.add(RESTARTED, "rollout-0 was killed", service="rollout-0", number=1)
    with pytest.raises(OSError, match="No space left"):
        history.add(WENT_BACK, "went back to step 4", incarnation=1, step=4)
    assert history.incarnation == 0
    path.unlink()
    history.add(RESTARTED, "actor was killed", service="actor", number=1)
    assert [text for _, text in History(tmp_path).lines()] == ["rollout-0 was killed", "actor was killed"]
    assert history.lines() == History(tmp_path).lines()
