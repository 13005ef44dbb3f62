"""Starts the services of a run again when they die or hang. What is decided is decided in `relax.run.restarts`.

    rollout, preprocess, recorder   alone: what the process held is given back at once, and the next one goes on
    queue                           alone, on the same journal and address; everyone else waits for it
    actor                           with the run: it goes back to the last checkpoint, see `relax.run.going_back`

Without a journal the queue's death is the run's, and so is the actor's. Called from the driver's thread only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flight.client import QueueClient
from flight.errors import DeadlineExceededError, FlightQueueError, UnavailableError
from relax.control.hub import ControlHub
from relax.durable import is_full
from relax.errors import ServiceError
from relax.launch.local import Exited, LocalSupervisor
from relax.run.history import HUNG, RESTARTED, History
from relax.run.restarts import Death, Over, RestartPolicy, RestartsConfig, Sign, hung
from relax.run.watch import RunWatch

QUEUE = "queue"
ACTOR = "actor"
JOURNAL_LOOK_S = 2.0
"""Seconds between two looks at whether the queue can still write."""
START_DEADLINE_S = 300.0
"""Longest time from the start of a service to its first heartbeat: the libraries are read from disk."""
NEEDS_JOURNAL = (
    "; queue.journal=true and checkpoint.interval_steps let a run go on without it from its last checkpoint"
)


@dataclass(frozen=True, kw_only=True)
class Hands:
    """What restarting takes: done by the driver, which knows the run."""

    start: Callable[[str], None]
    """Start a service by name, `queue` or `<role>-<index>`; must not block."""
    restart_queue: bool
    """Whether a queue that died comes back as it was."""
    go_back: Callable[[], None] | None
    """Take the run back to its last checkpoint, the actor included; None if it cannot. May raise FlightQueueError."""
    tell: Callable[[str], None]
    """Show one line to the operator."""


class Restarter:
    """Follows the processes of a run beside the driver."""

    def __init__(
        self,
        config: RestartsConfig,
        supervisor: LocalSupervisor,
        hub: ControlHub,
        history: History,
        hands: Hands,
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._hub = hub
        self._history = history
        self._hands = hands
        self._policy = RestartPolicy(config, draw=random.random)
        self._started_at: dict[int, float] = {}
        self._silent: dict[str, float] = {}
        self._has_to_go_back = False
        self._queue: QueueClient | None = None
        self._queue_answered_at = time.monotonic()
        self._is_queue_away = False
        self._full_since: float | None = None
        self._journal_seen_at = 0.0

    def attend(self, queue: QueueClient) -> None:
        """Begin to look after the run: its queue answers, its services are being started."""
        self._queue = queue
        self._queue_answered_at = time.monotonic()

    # ---- deaths -----------------------------------------------------------------------------------------------

    def died(self, gone: Exited) -> str:
        """Plan what follows from a death that nobody asked for; return why the run cannot go on, or ''."""
        story = str(gone) + (", though nobody had asked it to leave" if gone.returncode == 0 else "")
        if gone.name in self._silent:
            story += f", after {self._silent.pop(gone.name):.0f} s without a heartbeat"
        unit = ACTOR if gone.name.startswith(f"{ACTOR}-") else gone.name
        if self._queue is None:
            return story
        if (unit == QUEUE and not self._hands.restart_queue) or (unit == ACTOR and not self._hands.go_back):
            return story + (NEEDS_JOURNAL if self._config.max else "")
        if unit in self._policy.waiting or (unit == ACTOR and self._has_to_go_back):
            return ""  # another rank of it, ended by the first one's death
        error = gone.error if gone.returncode > 0 else ""
        decision = self._policy.died(
            Death(service=unit, returncode=gone.returncode, error=error), time.monotonic()
        )
        if isinstance(decision, Over):
            return f"{story}; {decision.why}" if decision.why else story
        if unit == QUEUE:
            self._is_queue_away = True
        elif unit == ACTOR:
            self._supervisor.stop(
                [each for each in self._supervisor.running() if each.startswith(f"{ACTOR}-")], 0.0
            )
        else:
            self._give_back(unit)
        self._hands.tell(f"{story}; starting {unit} again in {decision.delay_s:.1f} s")
        self._history.add(RESTARTED, story, service=unit, number=decision.number)
        return ""

    def _give_back(self, service: str) -> None:
        """Have others get at once what a dead service held; if the queue is away too, its next start does it."""
        if self._queue is not None and not self._is_queue_away:
            with suppress(FlightQueueError):
                self._queue.void(service)

    # ---- time -------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Start what is due, and kill what hangs."""
        now = time.monotonic()
        for unit in self._policy.due(now):
            if unit == ACTOR:
                self._has_to_go_back = True
            else:
                self._hands.start(unit)
        if self._has_to_go_back and not self._is_queue_away and self._hands.go_back is not None:
            try:
                self._hands.go_back()
                self._has_to_go_back = False
            except FlightQueueError:  # the queue has gone meanwhile: again when it is back
                pass
            except OSError as error:  # again when there is room
                if self.disk_was_full(error):
                    raise
        running = self._supervisor.running()
        silent = hung(running, self._signs(now, running), now)
        for name in (
            each for each in silent if each not in self._silent
        ):  # those are killed, and not yet reported
            self._silent[name] = self._config.silence_s
            self._history.add(HUNG, f"{name} was silent and is killed", service=name)
            self._supervisor.kill(name)

    def waiting(self) -> set[str]:
        """Return the services that are to be started again."""
        return set(self._policy.waiting)

    def _signs(self, now: float, running: dict[str, int]) -> dict[str, Sign]:
        """Return the last sign of life of each process; one that has given none counts from when it was first seen."""
        signs = {}
        members = {f"{each.role}-{each.index}": each for each in self._hub.members().values()}
        for name, pid in running.items():
            seen_at = self._started_at.setdefault(pid, now)
            member = members.get(name)
            if name == QUEUE:
                answered_at = max(self._queue_answered_at, seen_at)
                signs[name] = Sign(pid=pid, at=answered_at, patience_s=self._config.silence_s)
            elif member is None or member.pid != pid:
                signs[name] = Sign(pid=pid, at=seen_at, patience_s=START_DEADLINE_S)
            elif member.state == "lost":  # by the hub's clock, which does not count its own absence
                signs[name] = Sign(pid=pid, at=member.last_heartbeat_s, patience_s=self._config.silence_s)
        return signs

    # ---- the queue --------------------------------------------------------------------------------------------

    def collect(self, watch: RunWatch) -> bool:
        """Let the watch look into the queue; return whether it answered.

        Raises:
            ServiceError: it has been away, or the disk full, for too long.
        """
        try:
            watch.collect()
        except (UnavailableError, DeadlineExceededError):
            reason = self._queue_was_silent()
            if reason:
                raise ServiceError(reason) from None
            return False
        except OSError as error:  # what was not written down is not acked, or waits in memory
            reason = self.disk_was_full(error)
            if reason:
                raise ServiceError(reason) from error
            return False
        self._queue_answered()
        return True

    def _queue_answered(self) -> None:
        """Note that the queue has answered."""
        self._is_queue_away = False
        self._queue_answered_at = time.monotonic()
        self._full_since = None
        if self._hands.restart_queue and time.monotonic() - self._journal_seen_at > JOURNAL_LOOK_S:
            self._look_at_journal()

    def _look_at_journal(self) -> None:
        """Kill a queue that answers but can write nothing down any more: only its next start knows what is on disk."""
        self._journal_seen_at = time.monotonic()
        facts: dict[str, Any] | None = None
        if self._queue is not None:
            with suppress(FlightQueueError):
                facts = self._queue.journal()
        if facts and facts["failure"] and QUEUE in self._supervisor.running():
            self._history.add(
                HUNG, f"queue could not write its journal and is killed: {facts['failure']}", service=QUEUE
            )
            self._supervisor.kill(QUEUE)

    def disk_was_full(self, error: OSError) -> str:
        """Note that something could not be written; return why the run cannot go on, or '' while room may come."""
        now = time.monotonic()
        self._full_since = now if self._full_since is None else self._full_since
        full_s = now - self._full_since
        if not is_full(error) or full_s > self._config.patience_s:
            return f"disk: it must be there to write to, got for {full_s:.0f} s: {error}"
        self._hands.tell(f"the disk is full; waiting for room: {error}")
        return ""

    def _queue_was_silent(self) -> str:
        """Note that the queue has not answered; return why the run cannot go on, or ''."""
        self._is_queue_away = True
        away_s = time.monotonic() - self._queue_answered_at
        limit_s = max(self._config.patience_s, self._config.silence_s) + self._config.max_delay_s
        return f"queue: it must answer, got nothing for {away_s:.0f} s" if away_s > limit_s else ""
