"""The audit log."""

from __future__ import annotations

import json
import resource
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest

from flight.security import audit
from flight.security.audit import AuditLog


@pytest.fixture
def clock():
    """A time that the test moves."""
    now = [datetime(2026, 1, 2, tzinfo=UTC)]

    def read():
        return now[0]

    read.move = lambda seconds: now.__setitem__(0, now[0] + timedelta(seconds=seconds))
    return read


def lines(path):
    """Return the events of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_audit_writes_one_json_object_a_line_that_only_its_owner_reads(tmp_path, clock):
    """What is empty is left out."""
    log = AuditLog(tmp_path / "audit.jsonl", clock=clock)
    log.write("allowed", principal="driver", peer="ipv4:127.0.0.1:1", call="drop_table", tables=["a\nb"])
    log.close()
    log.write("allowed", principal="late")
    assert lines(tmp_path / "audit.jsonl") == [
        {
            "time": "2026-01-02T00:00:00+00:00",
            "event": "allowed",
            "principal": "driver",
            "peer": "ipv4:127.0.0.1:1",
            "call": "drop_table",
            "tables": ["a\nb"],
        }
    ]
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600


def test_audit_counts_a_flood_of_refusals(tmp_path, clock):
    """The disk is not theirs to fill."""
    with closing(AuditLog(tmp_path / "audit.jsonl", clock=clock)) as log:
        for _ in range(1000):
            log.write("unauthenticated", reason="none")
        clock.move(1)
        log.write("denied", reason="one more")
    events = lines(tmp_path / "audit.jsonl")
    assert [each["event"] for each in events] == ["unauthenticated"] * 50 + ["suppressed", "denied"]
    assert events[50]["num_refusals"] == 950


def test_audit_keeps_two_files_of_bounded_size(tmp_path, clock, monkeypatch):
    """The older one is `.1`."""
    monkeypatch.setattr(audit, "MAX_LOG_BYTES", 500)
    with closing(AuditLog(tmp_path / "audit.jsonl", clock=clock)) as log:
        for number in range(100):
            log.write("allowed", call=f"call {number}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.jsonl", "audit.jsonl.1"]
    kept = lines(tmp_path / "audit.jsonl.1") + lines(tmp_path / "audit.jsonl")
    assert kept[-1]["call"] == "call 99"
    assert all(path.stat().st_size < 600 for path in tmp_path.iterdir())


@pytest.mark.parametrize("num_torn_bytes", [0, 10])
def test_audit_without_room_counts_what_it_loses(tmp_path, clock, num_torn_bytes):
    """Nobody is refused for it, and a line that was begun does not spoil the next."""
    path = tmp_path / "audit.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(AuditLog(path, clock=clock)) as log:
        log.write("allowed", call="first")
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + num_torn_bytes, limits[1]))
        try:
            for _ in range(3):
                log.write("allowed", call="lost")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        log.write("allowed", call="kept")
    first, *torn, lost, kept = path.read_text().splitlines()
    assert [len(each) for each in torn] == [num_torn_bytes] * bool(num_torn_bytes)
    assert [json.loads(each).get("call") for each in (first, kept)] == ["first", "kept"]
    assert json.loads(lost)["num_events"] == 3
