"""What all services share: their connections, their phase and the way they end. It does no work of its own.

Life cycle: connect -> `ready` -> the role's loop -> `done`, exit 0. A role leaves its loop when its phase is
`drain` or `stop`; any exception ends the process with the error as the last line of its log, and with code 1 if a
restart would end the same way, else 75 (see `relax.run.restarts`).
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from flight.client import QueueClient
from relax.config import RunConfig
from relax.control.course import COURSE_KEY, Course, fence_key
from relax.control.member import ControlMember
from relax.records import INSTANT


class PartClock:
    """Seconds that a service spends in each part of its work, since they were last reported."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside the block as `name`; that of a block inside it counts as the inner one's alone."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        """Give the time since the last turn to the innermost open part."""
        now = self._now()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now

    def report(self) -> dict[str, float]:
        """Return the metrics `time/<part>_s` and begin again from zero."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return {f"time/{name}_s": value for name, value in seconds.items()}


@dataclass(kw_only=True)
class Service:
    """One running service: who it is and what it talks to."""

    role: str
    index: int
    config: RunConfig
    run_dir: Path
    model_dir: Path
    queue: QueueClient
    control: ControlMember
    clock: PartClock = field(default_factory=PartClock)
    course: Course = field(default_factory=Course)
    """Where the run is as far as this service has followed it."""
    _puts: Iterator[int] = field(default_factory=itertools.count)
    _start: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    """Tells what this process puts from what one before it did."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def leaving(self) -> bool:
        """Whether the role has to take no new work."""
        return self.control.phase in ("drain", "stop")

    @property
    def stopping(self) -> bool:
        """Whether the role has to drop even what it has in hand."""
        return self.control.phase == "stop"

    @property
    def has_gone_back(self) -> bool:
        """Whether the run has gone back to a checkpoint since this service last followed: drop what is in hand."""
        return self._present().incarnation != self.course.incarnation

    def begin(self) -> None:
        """Take up the course of the run and say so: from here on nothing of an earlier incarnation comes from here."""
        self.course = self._present()
        self.control.set(fence_key(self.control.name), self.course.incarnation)

    def follow(self) -> None:
        """Go along if the run has gone back; nothing must be in hand."""
        if self.has_gone_back:
            self.begin()

    def _present(self) -> Course:
        return Course.of(self.control.get(COURSE_KEY))

    def wait_while_paused(self) -> None:
        """Block while the phase is `pause`; heartbeats go on and a silent hub ends the wait."""
        while self.control.phase == "pause":
            self.control.wait_for(lambda: self.control.phase != "pause", deadline_s=1.0)

    def put_metrics(self, step: int, policy_version: int, values: Mapping[str, float]) -> None:
        """Put one row a value into `metrics`."""
        self.queue.put("metrics", self.metric_rows(step, policy_version, values), writer=self.role)

    def metric_rows(self, step: int, policy_version: int, values: Mapping[str, float]) -> pa.Table:
        """Return one row a value for table `metrics`, each with a uid of its own."""
        count, number = len(values), next(self._puts)
        return pa.table(
            {
                "uid": [f"{self.name}/{self._start}/{number}/{name}" for name in values],
                "step": pa.array([step] * count, pa.int64()),
                "policy_version": pa.array([policy_version] * count, pa.int64()),
                "role": pa.array([self.role] * count, pa.string()),
                "name": list(values),
                "value": pa.array([float(value) for value in values.values()], pa.float64()),
                "time": pa.array([datetime.now(UTC)] * count, INSTANT),
            }
        )

    def put_times(self, policy_version: int, counts: Mapping[str, float] | None = None) -> None:
        """Put what the clock counted since the last time, and counts of the role's own."""
        self.put_metrics(policy_version, policy_version, self.clock.report() | dict(counts or {}))

    def put_row_error(self, uid: str, place: str, reason: str) -> None:
        """Count one refused row; the same uid counts once however often it is met."""
        table = pa.table(
            {"uid": [f"{self.role}/{uid}"], "stage": [self.role], "place": [place], "reason": [reason]}
        )
        self.queue.put("row_errors", table, writer=self.role)

    def report(self, **facts: Any) -> None:
        """Show what the service is doing to whoever looks at the members."""
        self.control.set_status(json.dumps(facts))
