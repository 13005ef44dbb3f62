"""Which service is started again, when, and when it is enough. Pure: no process, no clock, no random source.

    running --death--> waiting --due--> started --first heartbeat--> running
       |                  \\-- budget spent, or the same error twice, or a verdict --> over: the run ends
       \\-- silence --> hung: it is killed, and its death is as any other

Two things make a death final at once: the service said itself that a start would end the same way (`VERDICT_CODE`),
and a second death with the same error soon after the restart (`STEADY_S`): a fault of the program, which no restart
mends. A death by a signal has no error of its own and is never the same as another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from relax.errors import ConfigError

VERDICT_CODE = 1
"""Exit code of a service that says that a restart would end the same way."""
AGAIN_CODE = 75
"""Exit code of a service that failed in a way that may pass."""
STEADY_S = 60.0
"""A service that has run for so long has got over its last error; the same one again is another matter."""
JITTER = 0.5
"""Share of a delay that is drawn."""


@dataclass(kw_only=True)
class RestartsConfig:
    """When services that died are started again."""

    max: int = 8
    """Restarts of one service within `window_s`; a death beyond ends the run. 0: every death does."""
    window_s: float = 600.0
    """Seconds after which a restart does not count any more."""
    first_delay_s: float = 0.5
    """Wait before the first restart; each further one within the window waits twice as long, half of it drawn."""
    max_delay_s: float = 30.0
    """Longest wait before a restart."""
    silence_s: float = 60.0
    """Seconds without a heartbeat after which a service counts as hung and is killed; also of the queue's server."""
    patience_s: float = 120.0
    """Longest time that a service waits for a queue that does not answer, before it gives up itself."""

    def __post_init__(self) -> None:
        for name, least in (("max", 0), ("window_s", 1), ("silence_s", 15), ("patience_s", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"restarts.{name}: must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.first_delay_s <= self.max_delay_s:
            raise ConfigError(
                f"restarts.first_delay_s: must be above 0 and at most max_delay_s={self.max_delay_s}, "
                f"got {self.first_delay_s}"
            )


@dataclass(frozen=True, kw_only=True)
class Death:
    """How a service ended. `error` is its own last error line, empty after a signal."""

    service: str
    returncode: int
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Again:
    """It is to be started again: its restart number `number` within the window, in `delay_s` seconds."""

    service: str
    number: int
    delay_s: float


@dataclass(frozen=True, kw_only=True)
class Over:
    """It is not: why, as the end of a sentence; '' when the death speaks for itself."""

    service: str
    why: str


class RestartPolicy:
    """Deaths in, decisions out. Times are of the caller's clock, in seconds; `draw` returns numbers from 0 to 1."""

    def __init__(self, config: RestartsConfig, *, draw: Callable[[], float]) -> None:
        self._config = config
        self._draw = draw
        self._restarts: dict[str, deque[float]] = {}
        self._last_error: dict[str, tuple[str, float]] = {}
        """Of the death before, with when the service was to be started again."""
        self._due: dict[str, float] = {}

    def died(self, death: Death, now: float) -> Again | Over:
        """Decide what becomes of a service that has ended unasked."""
        config, service = self._config, death.service
        if not config.max or death.returncode == VERDICT_CODE:
            return Over(service=service, why="")
        error, at = self._last_error.get(service, ("", 0.0))
        if error and error == death.error and now - at <= STEADY_S:
            return Over(service=service, why="as it did when it was started before")
        times = self._restarts.setdefault(service, deque())
        while times and times[0] <= now - config.window_s:
            times.popleft()
        if len(times) >= config.max:
            return Over(service=service, why=f"{len(times)} restarts in {config.window_s:.0f} s did not help")
        longest_s = min(config.first_delay_s * 2 ** len(times), config.max_delay_s)
        delay_s = longest_s * (1 - JITTER + JITTER * self._draw())
        times.append(now)
        self._last_error[service] = death.error, now + delay_s
        self._due[service] = now + delay_s
        return Again(service=service, number=len(times), delay_s=delay_s)

    @property
    def waiting(self) -> list[str]:
        """Return the services that are to be started again."""
        return list(self._due)

    def due(self, now: float) -> list[str]:
        """Return the services whose wait is over, once each, oldest death first."""
        over = [service for service, at in self._due.items() if at <= now]
        for service in over:
            del self._due[service]
        return over


@dataclass(frozen=True, kw_only=True)
class Sign:
    """The last sign of life of a process, and how long it may be silent."""

    pid: int
    at: float
    patience_s: float


def hung(running: Mapping[str, int], signs: Mapping[str, Sign], now: float) -> list[str]:
    """Return the running services (name to pid) whose process has been silent for too long.

    A sign of another process of that name, one before, does not count; nor does the silence of one that has given none.
    """
    return [
        name
        for name, pid in running.items()
        if name in signs and signs[name].pid == pid and now - signs[name].at > signs[name].patience_s
    ]
