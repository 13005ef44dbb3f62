"""What befell a run beside its steps: started, services started again, taken back, resumed, ended. One line each.

`history.jsonl` in the run's directory: {"time": UTC, "event": name, "text": for people, ...facts}. It is appended to
and outlives the driver, so that a resumed run knows its incarnation and the report tells of all sessions.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relax.durable import append_whole, is_full

FILE = "history.jsonl"
STARTED, RESUMED, RESTARTED, HUNG, WENT_BACK, SCALED, ENDED = (
    "started",
    "resumed",
    "restarted",
    "hung",
    "went_back",
    "scaled",
    "ended",
)


FIRM = (STARTED, RESUMED, WENT_BACK, ENDED)
"""Events that count only once they are on disk."""


class History:
    """The events of a run, those of earlier drivers included."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self._waiting: list[bytes] = []
        """Lines for which the disk had no room."""
        self.events: list[dict[str, Any]] = _read(self._path)

    def add(self, event: str, text: str, **facts: Any) -> None:
        """Append an event; it is on disk when this returns, or if the disk is full, once the next one is.

        What says where the run goes on from, and that it has ended, must be on disk: the disk's error is raised.
        """
        line = {"time": datetime.now(UTC).isoformat(), "event": event, "text": text} | facts
        self._waiting.append(json.dumps(line).encode() + b"\n")
        try:
            append_whole(self._path, b"".join(self._waiting))
        except OSError as error:
            if event in FIRM or not is_full(error):
                del self._waiting[-1]
                raise
        else:
            self._waiting.clear()
        self.events.append(line)

    @property
    def incarnation(self) -> int:
        """Return the newest incarnation that the run has had."""
        return max((event.get("incarnation", 0) for event in self.events), default=0)

    def num_restarts(self) -> Counter[str]:
        """Return how often each service was started again."""
        return Counter(event["service"] for event in self.events if event["event"] == RESTARTED)

    def lines(self) -> list[tuple[str, str]]:
        """Return (time, text) of every event, oldest first."""
        return [(event["time"], event["text"]) for event in self.events]


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file; a last line that a crash has torn is cut off."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]
