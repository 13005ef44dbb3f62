"""Takes a run back to a checkpoint: the queue, the files and the services, in an order that lets nothing slip through.

    1. preprocess and recorder are ended: they stand where the queue says
    2. a new course is set; every rollout service drops what it has in hand and says so, or is killed
    3. the queue is taken back: what was put since is gone, what was acked since is there again
    4. what was recorded and measured after the checkpoint is removed
    5. actor, preprocess and recorder are started; the actor announces the checkpoint's version

After 2 nothing of the old incarnation can reach the queue, so after 3 there is nothing of it in the queue. Policy
versions after the checkpoint will be other weights under the same numbers; the incarnation tells them apart.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path

from flight.client import QueueClient
from flight.schema import TableSpec
from relax.control.course import COURSE_KEY, Course, fence_key
from relax.control.hub import ControlHub
from relax.launch.local import LocalSupervisor
from relax.observe.recorder import RolloutRecorder
from relax.run.checkpoints import (
    checkpoint_id,
    checkpoint_steps,
    choose,
    delete_files,
    known_to,
    pin_beginning,
    reconcile,
)
from relax.run.history import RESUMED, STARTED, WENT_BACK, History

FENCE_DEADLINE_S = 20.0
"""Longest wait for rollout services to drop what they have in hand; those that do not are killed."""
LAST_PUTS_S = 2.0
"""Wait after such a kill: the server takes up to a second to see that a caller is gone."""
LOOK_S = 0.05


def first_course(
    queue: QueueClient, specs: Mapping[str, TableSpec], history: History, *, can_go_back: bool
) -> Course:
    """Make the tables of a new run, and keep them as they are if it may come back to its beginning."""
    for spec in specs.values():
        queue.create_table(spec, exist_ok=False)
    if can_go_back:
        pin_beginning(queue)
    history.add(STARTED, "started", incarnation=0)
    return Course()


def next_course(queue: QueueClient, run_dir: Path, history: History) -> Course:
    """Return the course of a run that goes back to its newest checkpoint, and note it."""
    course = Course(history.incarnation + 1, choose(_kept(queue, run_dir), None))
    history.add(WENT_BACK, f"went back to step {course.step}", **course.to_value())
    return course


def resume_course(queue: QueueClient, run_dir: Path, history: History, step: int | None) -> Course:
    """Take a run of which nothing is running back to a step, or to its newest checkpoint; return its course.

    Raises:
        ConfigError: it has no such checkpoint; nothing has changed.
    """
    course = Course(history.incarnation + 1, choose(_kept(queue, run_dir), step))
    history.add(RESUMED, f"resumed after step {course.step}", **course.to_value())
    take_back(queue, run_dir, course.step)
    return course


def take_back(queue: QueueClient, run_dir: Path, step: int) -> None:
    """Take the queue, and what was recorded, back to the checkpoint of `step`. No recorder must be running.

    Later checkpoints are deleted: they are of what does not count any more. So is what has but one half.
    """
    found = reconcile(known_to(queue), checkpoint_steps(run_dir))
    for name in found.to_commit:
        queue.checkpoint_commit(name)
    queue.checkpoint_rewind(checkpoint_id(step))
    later = [each for each in found.kept if each > step]
    for name in (*found.to_release, *map(checkpoint_id, later)):
        queue.checkpoint_release(name)
    for each in (each for each in checkpoint_steps(run_dir) if each > step):
        delete_files(run_dir, each)
    recorder = RolloutRecorder(run_dir / "rollouts")
    recorder.forget_from(step)
    recorder.close()


def _kept(queue: QueueClient, run_dir: Path) -> tuple[int, ...]:
    return reconcile(known_to(queue), checkpoint_steps(run_dir)).kept


def fence(hub: ControlHub, supervisor: LocalSupervisor, services: Collection[str], course: Course) -> None:
    """Set a new course and wait until nothing of an earlier one can come from `services` any more."""
    hub.set(COURSE_KEY, course.to_value())
    ends_at = time.monotonic() + FENCE_DEADLINE_S

    def behind() -> list[str]:
        running = supervisor.running()
        return [
            each for each in services if each in running and _incarnation(hub, each) != course.incarnation
        ]

    while (late := behind()) and time.monotonic() < ends_at:
        for each in late:
            # One that has just been started has not joined; it takes the new course up when it does.
            if not _has_joined(hub, each, supervisor.running().get(each)):
                services = [other for other in services if other != each]
        time.sleep(LOOK_S)
    for each in late:
        supervisor.kill(each)
    if late:
        time.sleep(LAST_PUTS_S)


def _incarnation(hub: ControlHub, service: str) -> int:
    value = hub.get(fence_key(service.replace("-", "/")), -1)
    return int(value)


def _has_joined(hub: ControlHub, service: str, pid: int | None) -> bool:
    member = hub.members().get(service.replace("-", "/"))
    return member is not None and member.pid == pid
