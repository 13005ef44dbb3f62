"""What all services share: their connections, their phase and the way they end. It does no work of its own.

Life cycle: connect -> `ready` -> the role's loop -> `done`, exit 0. A role leaves its loop when its phase is
`drain` or `stop`; any exception ends the process with code 1 and the error as the last line of its log.
"""

from __future__ import annotations

import itertools
import json
import time
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
    _puts: Iterator[int] = field(default_factory=itertools.count)

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
                "uid": [f"{self.name}/{number}/{name}" for name in values],
                "step": pa.array([step] * count, pa.int64()),
                "policy_version": pa.array([policy_version] * count, pa.int64()),
                "role": pa.array([self.role] * count, pa.string()),
                "name": list(values),
                "value": pa.array([float(value) for value in values.values()], pa.float64()),
                "time": pa.array([datetime.now(UTC)] * count, INSTANT),
            }
        )

    def put_times(self, policy_version: int) -> None:
        """Put what the clock counted since the last time."""
        self.put_metrics(policy_version, policy_version, self.clock.report())

    def put_row_error(self, uid: str, place: str, reason: str) -> None:
        """Count one refused row; the same uid counts once however often it is met."""
        table = pa.table(
            {"uid": [f"{self.role}/{uid}"], "stage": [self.role], "place": [place], "reason": [reason]}
        )
        self.queue.put("row_errors", table, writer=self.role)

    def report(self, **facts: Any) -> None:
        """Show what the service is doing to whoever looks at the members."""
        self.control.set_status(json.dumps(facts))
