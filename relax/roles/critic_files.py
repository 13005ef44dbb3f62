"""The critic's head on disk, when it is a service: a file for each policy version, so that nothing of it is lost.

    critic/000012.safetensors   head and optimizer after step 12, in a later incarnation critic/000012-1.safetensors

The critic writes one before it acks the rows of a step; the actor puts that of a checkpoint's step into the checkpoint,
so that both are committed together. A critic that is started again goes on from its newest file, and in a run that has
gone back from that of the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from relax.control.course import Course
from relax.errors import ServiceError

LOOK_S = 0.05


def head_file(run_dir: Path, course: Course, version: int) -> Path:
    """Return where the head of a policy version lies."""
    return run_dir / "critic" / f"{course.snapshot_name(version)}.safetensors"


def newest_head(run_dir: Path, course: Course) -> tuple[int, Path] | None:
    """Return the newest head of this incarnation, with its version; None if there is none."""
    versions = [
        int(path.name[:6])
        for path in (run_dir / "critic").glob("[0-9]*.safetensors")
        if path == head_file(run_dir, course, int(path.name[:6]))
    ]
    return (max(versions), head_file(run_dir, course, max(versions))) if versions else None


def retire_heads(run_dir: Path, course: Course, version: int, keep: int) -> None:
    """Delete all but the newest `keep` heads up to `version`, and those of earlier incarnations."""
    kept = {head_file(run_dir, course, each) for each in range(version - keep + 1, version + 1)}
    for path in (run_dir / "critic").glob("[0-9]*.safetensors"):
        if path not in kept:
            path.unlink(missing_ok=True)


def wait_for_head(path: Path, deadline_s: float, is_over: Callable[[], bool]) -> Path:
    """Return the file once it is there.

    Raises:
        ServiceError: it did not come by the deadline, or before the role has to stop.
    """
    end = time.monotonic() + deadline_s
    while not path.exists():
        if is_over() or time.monotonic() > end:
            raise ServiceError(
                f"actor: the critic must have learned from the step of a checkpoint, got no {path.name} in "
                f"{path.parent} within {deadline_s:.0f} s"
            )
        time.sleep(LOOK_S)
    return path
