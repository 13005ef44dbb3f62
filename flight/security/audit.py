"""The audit log: one JSON object a line, of what changed tables and of what was refused. It never sees a token.

    {"time": "2026-01-02T03:04:05.678901+00:00", "event": "denied", "principal": "rollout-0",
     "peer": "ipv4:127.0.0.1:4711",
     "call": "drop_table", "tables": ["prompts"], "reason": "..."}

Events: `allowed` (admin rights only), `denied`, `unauthenticated`, `joined` (a principal's first call from a peer),
`reloaded` and `not_reloaded` (of the access file). A flood of refusals is counted, not written: at most
`MAX_REFUSALS_PER_S` lines a second, the rest as one `suppressed`. Events that find no room on the disk are counted,
too, and told as one `lost`: nobody is refused for want of a log.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from flight.security.limits import CallBucket

MAX_REFUSALS_PER_S = 50.0
MAX_LOG_BYTES = 64 << 20
"""Size at which a log is renamed to `.1`, of which one is kept."""


class AuditLog:
    """Appends to a file that only this user may read. Thread-safe."""

    def __init__(self, path: Path, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._refusals = CallBucket(MAX_REFUSALS_PER_S, self._clock().timestamp())
        self._num_suppressed = 0
        self._num_lost = 0
        self._is_torn = False
        self._file = self._open()

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._file.close()

    def write(
        self,
        event: str,
        *,
        principal: str = "",
        peer: str = "",
        call: str = "",
        tables: Sequence[str] = (),
        reason: str = "",
    ) -> None:
        """Note an event. A refusal may be counted only."""
        now = self._clock()
        with self._lock:
            if self._file.closed:
                return
            if event in ("denied", "unauthenticated") and not self._refusals.take(now.timestamp()):
                self._num_suppressed += 1
                return
            num_suppressed, self._num_suppressed = self._num_suppressed, 0
            if num_suppressed:
                self._append(now, {"event": "suppressed", "num_refusals": num_suppressed})
            facts = {
                "principal": principal,
                "peer": peer,
                "call": call,
                "tables": list(tables),
                "reason": reason,
            }
            self._append(now, {"event": event} | {name: value for name, value in facts.items() if value})

    def _append(self, now: datetime, facts: dict[str, Any]) -> None:
        lost = [{"event": "lost", "num_events": self._num_lost}] if self._num_lost else []
        lines = [msgspec.json.encode({"time": now.isoformat()} | each) + b"\n" for each in (*lost, facts)]
        data = (b"\n" if self._is_torn else b"") + b"".join(lines)
        try:
            num_written = self._file.write(data)
            if self._file.tell() > MAX_LOG_BYTES:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._file.close()
                self._file = self._open()
        except OSError:
            num_written = 0
        if num_written == len(data):
            self._num_lost, self._is_torn = 0, False
        else:
            self._num_lost += 1
            self._is_torn = self._is_torn or num_written > 0

    def _open(self) -> io.FileIO:
        return io.FileIO(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")
