"""The weights of a rollout engine, out of those that the run has published: which it has, which are newer.

A version is known with the incarnation of the run: after a return to a checkpoint the newest weights may have a lower
number than those that the engine has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from relax.control.messages import PolicyVersion
from relax.roles.service import Service
from relax.rollout.engine import RolloutEngine
from relax.run.snapshots import weights_dir

LOOK_S = 1.0


class EngineWeights:
    """Keeps one engine at published weights. It begins with those that the run began with."""

    def __init__(self, service: Service, engine: RolloutEngine) -> None:
        self._service = service
        self._engine = engine
        self._adopted: tuple[int, int] = (0, 0)
        """Incarnation and version."""

    def adopt_newest(self) -> bool:
        """Adopt the newest published weights of the present incarnation; return whether the engine has any."""
        newest = self.newest()
        if newest is None:
            self._wait(lambda: self.newest() is not None)
            return False
        return self._adopt(newest)

    def adopt_version(self, version: int) -> bool:
        """Adopt one published version of the present incarnation; return whether it is there still."""
        course = self._service.course
        path = weights_dir(self._service.run_dir) / course.snapshot_name(version)
        return self._adopt(PolicyVersion(version, path, course.incarnation))

    def newest(self) -> PolicyVersion | None:
        """Return the newest published weights of the present incarnation; None before there are any."""
        newest = self._service.control.policy_version
        return newest if newest and newest.incarnation == self._service.course.incarnation else None

    def wait_for(self, version: int) -> None:
        """Wait a moment until the control plane has told of `version`."""

        def is_known() -> bool:
            newest = self.newest()
            return newest is not None and newest.version >= version

        self._wait(is_known)

    @property
    def is_behind(self) -> bool:
        """Whether there are newer weights than the engine's, or the service is called away from what it does."""
        newest = self.newest()
        return self._is_called_away or (
            newest is not None and (newest.incarnation, newest.version) > self._adopted
        )

    @property
    def _is_called_away(self) -> bool:
        return self._service.leaving or self._service.has_gone_back

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._service.control.wait_for(lambda: condition() or self._is_called_away, deadline_s=LOOK_S)

    def _adopt(self, weights: PolicyVersion) -> bool:
        """Adopt weights unless the engine has them; return whether it has them now."""
        if (weights.incarnation, weights.version) != self._adopted:
            try:
                with self._service.clock.part("adopt"):
                    self._engine.adopt(Path(weights.path), weights.version)
            except FileNotFoundError:  # replaced by a newer snapshot meanwhile
                return False
            self._adopted = weights.incarnation, weights.version
        return True
