"""Rollout services that come and go while a run goes on. What is wanted is a key of the control plane.

    more   the missing ones are started; each adopts the newest weights before it takes a prompt
    fewer  the highest ones get the phase `drain`: they finish or give back what they have in hand, and end

Both are steps of `tick`, which looks at what there is: a service that dies on its way out has left too, one that is
wanted again before it has left is started once it has. Called from the driver's thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from flight.errors import FlightQueueError
from relax.config import RunConfig
from relax.control.hub import ControlHub
from relax.control.scale import SCALE_KEY, WORKERS_KEY, member_phase_key
from relax.run.services import Services

ROLE = "rollout"


@dataclass(frozen=True, kw_only=True)
class ScalingHands:
    """What scaling takes: done by the driver, which knows the run."""

    running: Callable[[], dict[str, int]]
    """Return the pid of each running service by name."""
    give_back: Callable[[str], object]
    """Have others get at once what a service held; may raise FlightQueueError."""
    tell: Callable[[str], None]
    """Show one line to the operator, and keep it."""


class Scaling:
    """Follows `SCALE_KEY`."""

    def __init__(self, config: RunConfig, hub: ControlHub, services: Services, hands: ScalingHands) -> None:
        self._hub = hub
        self._services = services
        self._hands = hands
        self._most = most_services(config)
        self._wanted = config.rollout.num_workers
        self._leaving: set[int] = set()
        self._is_over = False
        hub.set(WORKERS_KEY, self._wanted)

    def tick(self) -> None:
        """Take up what is wanted now, and bring the services closer to it."""
        if self._is_over:
            return
        self._take_up()
        running = self._hands.running()
        for index in sorted(self._services.indices(ROLE)):
            if index >= self._wanted and index not in self._leaving:
                self._leave(index, is_running=_name(index) in running)
        for index in range(self._wanted):
            if index not in self._services.indices(ROLE):
                self._services.add(ROLE, index)
                self._services.start(_name(index))

    def end(self) -> None:
        """Change nothing any more: the role leaves as a whole."""
        self._is_over = True

    def has_left(self, name: str) -> bool:
        """Take note that a service has ended; return whether it was asked to leave alone."""
        role, _, index = name.rpartition("-")
        if role != ROLE or int(index) not in self._leaving:
            return False
        self._forget(int(index))
        return True

    def _take_up(self) -> None:
        wanted = self._hub.get(SCALE_KEY, self._wanted)
        if wanted == self._wanted:
            return
        if wanted > self._most:
            self._hands.tell(f"{SCALE_KEY}: must be at most {self._most} in this run, got {wanted}")
            self._hub.set(SCALE_KEY, self._wanted)
            return
        self._hands.tell(f"{self._wanted} rollout service(s) become {wanted}")
        self._wanted = wanted
        self._hub.set(WORKERS_KEY, wanted)

    def _leave(self, index: int, *, is_running: bool) -> None:
        self._leaving.add(index)
        if is_running:
            self._hub.set(member_phase_key(ROLE, index), "drain")
        else:  # it has died, and was to be started again
            self._forget(index)

    def _forget(self, index: int) -> None:
        self._leaving.discard(index)
        self._services.remove(ROLE, index)
        self._hub.set(member_phase_key(ROLE, index), None)
        with suppress(FlightQueueError):  # the queue is away: leases end by themselves
            self._hands.give_back(_name(index))


def most_services(config: RunConfig) -> int:
    """Return how many rollout services there may be: each needs a prompt of every batch, and servers of its own."""
    urls = config.rollout.engine_urls if config.rollout.engine == "sglang" else []
    return min(config.prompts_per_step, config.rollout.num_workers if urls else config.prompts_per_step)


def _name(index: int) -> str:
    return f"{ROLE}-{index}"
