"""How often the control plane speaks and when silence means loss. Pure; it reads no clock."""

from __future__ import annotations

from dataclasses import dataclass

from relax.control.errors import ControlRefusedError


@dataclass(frozen=True, kw_only=True)
class ControlTimings:
    """Intervals and limits of silence; hub and members take the same values."""

    heartbeat_s: float = 1.0
    """Seconds between two heartbeats, both ways."""

    member_timeout_s: float = 10.0
    """Seconds of silence after which the hub reports a member as lost."""

    hub_timeout_s: float = 10.0
    """Seconds of silence after which a member's phase is `stop`."""

    retry_s: float = 0.02
    """Seconds until an unanswered request for a snapshot is sent again; doubles up to `heartbeat_s`."""

    def __post_init__(self) -> None:
        """Refuse limits that one late heartbeat would cross.

        Raises:
            ControlRefusedError: an interval is not positive, or a timeout is below two heartbeats.
        """
        for name in ("heartbeat_s", "retry_s"):
            if not getattr(self, name) > 0:
                raise ControlRefusedError(
                    f"ControlTimings: {name} must be above 0, got {getattr(self, name)}; omit it"
                )
        for name in ("member_timeout_s", "hub_timeout_s"):
            if getattr(self, name) < 2 * self.heartbeat_s:
                raise ControlRefusedError(
                    f"ControlTimings: {name} must be at least two heartbeats ({2 * self.heartbeat_s} s), "
                    f"got {getattr(self, name)}; raise it or lower heartbeat_s"
                )


class AttentiveClock:
    """Time during which its owner was awake: a step longer than `max_step_s` counts as `max_step_s`.

    A process that was stopped or starved finds, on waking, hours gone by and the others' heartbeats still
    unread. Silence is therefore measured on this clock, so that nobody is declared lost for the listener's
    own absence.
    """

    def __init__(self, max_step_s: float) -> None:
        self._max_step_s = max_step_s
        self._previous_s: float | None = None
        self._elapsed_s = 0.0

    def advance(self, now: float) -> float:
        """Return attentive seconds since the first call, given the monotonic time `now`."""
        if self._previous_s is not None:
            self._elapsed_s += min(max(now - self._previous_s, 0.0), self._max_step_s)
        self._previous_s = now
        return self._elapsed_s
