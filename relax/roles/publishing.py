"""The weights of a run on their way out: gathered by the actor's thread, written and announced by another.

    actor   [version before is announced] -> gather, bucket after bucket -> rows are acked: `release` -> next step
    writer  hash, write or link each bucket -> whole under its name -> [released] -> announce -> delete old snapshots

So a step is held up by the gather alone, unless the writer is slower than a step or than `weights.max_waiting` buckets;
and a version is announced once its snapshot is whole and the rows of its step count as trained, whichever comes last.
What the writer fails at is raised in the actor's thread, at the next publish, wait or checkpoint.
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from relax.errors import ServiceError
from relax.models.snapshot import SnapshotWriter, WeightFile, Written
from relax.roles.service import Service
from relax.run.evaluation_schedule import KEPT_KEY, Kept
from relax.run.snapshots import surplus, weights_dir
from relax.train.export import WeightExport

DEADLINE_S = 1800.0
"""Longest wait of the two threads for each other."""
LOOK_S = 0.1
Times = dict[str, float]


class _GivenUpError(Exception):
    """The actor's thread has failed or left: nothing more is announced."""


@dataclass
class _Publication:
    """A version between the two threads."""

    version: int
    directory: Path
    files: queue.Queue[WeightFile | None]
    began: float = field(default_factory=time.monotonic)
    released: threading.Event = field(default_factory=threading.Event)
    given_up: threading.Event = field(default_factory=threading.Event)
    then: Callable[[Times], None] | None = None

    def next_file(self) -> WeightFile | None:
        """Wait for the next file; None is the end."""
        ends_at = time.monotonic() + DEADLINE_S
        while time.monotonic() < ends_at:
            if self.given_up.is_set():
                raise _GivenUpError
            with suppress(queue.Empty):
                return self.files.get(timeout=LOOK_S)
        raise ServiceError(
            f"publish {self.version}: the gather must end within {DEADLINE_S:.0f} s, got no end"
        )

    def wait_for_release(self) -> None:
        ends_at = time.monotonic() + DEADLINE_S
        while not self.released.wait(LOOK_S):
            if self.given_up.is_set():
                raise _GivenUpError
            if time.monotonic() > ends_at:
                raise ServiceError(
                    f"publish {self.version}: its rows must be acked within {DEADLINE_S:.0f} s, got no end"
                )


class Publisher:
    """Publishes one version at a time. All ranks of a trainer have one; rank 0 alone writes and announces.

    Attributes:
        pinned: Versions whose snapshots are not deleted, however old.
        newest: The last snapshot that was announced.
    """

    def __init__(self, service: Service, export: WeightExport, *, speaks: bool) -> None:
        self.pinned: set[int] = set()
        self.newest: Path | None = None
        self._service = service
        self._export = export
        self._speaks = speaks
        self._has_gathered = False
        self._before: Written | None = None
        self._published: dict[int, Path] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._current: tuple[_Publication, Future[None]] | None = None

    def publish(self, version: int) -> None:
        """Gather the weights and hand them to the writer. All ranks must call it; `release` has to follow.

        Blocks until the version before is announced, then for the gather.

        Raises:
            Exception: what the writer of the version before has failed at.
        """
        clock = self._service.clock
        with clock.part("publish_wait"):
            self.join()
        with clock.part("publish_gather"):
            files = self._export.files(again=self._has_gathered)
            if self._speaks:
                self._begin(version)
                for file in files:
                    self._hand_over(file)
                self._hand_over(None)
            else:
                for _ in files:
                    pass  # rank 0 has what this rank sends
            self._has_gathered = True

    def release(self, then: Callable[[Times], None] | None = None) -> None:
        """Let the version be announced as soon as it is whole; `then` is called afterwards, by the writer's thread.

        It gets metrics of the publication.
        """
        if self._current is not None:
            publication, _ = self._current
            publication.then = then
            publication.released.set()

    def check(self) -> None:
        """Raise what the writer has failed at, if it has. Does not block."""
        if self._current is not None and self._current[1].done():
            self.join()

    def join(self) -> None:
        """Wait until what was released is announced; raise what the writer has failed at."""
        if self._current is not None:
            _, writing = self._current
            try:
                writing.result(DEADLINE_S)
            finally:
                self._current = None

    def close(self) -> None:
        """Announce nothing more, and end the writer's thread. Idempotent."""
        if self._current is not None:
            self._current[0].given_up.set()
        self._pool.shutdown(wait=True)

    def _begin(self, version: int) -> None:
        directory = weights_dir(self._service.run_dir) / self._service.course.snapshot_name(version)
        waiting = self._service.config.weights.max_waiting
        publication = _Publication(version, directory, queue.Queue(maxsize=waiting))
        self._current = publication, self._pool.submit(self._write, publication)

    def _hand_over(self, file: WeightFile | None) -> None:
        """Give a file to the writer; blocks while it has too many."""
        ends_at = time.monotonic() + DEADLINE_S
        while self._current is not None and time.monotonic() < ends_at:
            publication, writing = self._current
            if writing.done():
                self.join()
            with suppress(queue.Full):
                publication.files.put(file, timeout=LOOK_S)
                return
        raise ServiceError(f"publish: the writer must take a bucket within {DEADLINE_S:.0f} s, got no end")

    # ---- the writer's thread ----------------------------------------------------------------------------------

    def _write(self, publication: _Publication) -> None:
        try:
            write_s = self._write_files(publication)
            publication.wait_for_release()
        except _GivenUpError:
            return
        self._announce(publication)
        if publication.then is not None and self._before is not None:
            times = {
                "time/publish_write_s": write_s,
                "time/publish_s": time.monotonic() - publication.began,
                "publish/num_bytes": float(self._before.num_bytes),
                "publish/num_bytes_written": float(self._before.num_bytes_new),
            }
            publication.then(times)

    def _write_files(self, publication: _Publication) -> float:
        """Write the snapshot; return the seconds of it that were not spent in waiting for the gather."""
        seconds = 0.0
        with SnapshotWriter(publication.directory, publication.version, before=self._before) as writer:
            while (file := publication.next_file()) is not None:
                started = time.monotonic()
                writer.add(file)
                seconds += time.monotonic() - started
            started = time.monotonic()
            self._before = writer.finish()
        return seconds + time.monotonic() - started

    def _announce(self, publication: _Publication) -> None:
        """Tell the control plane and the queue of new weights, in this order, and delete the oldest."""
        service, version = self._service, publication.version
        service.control.announce_policy_version(
            version, publication.directory, incarnation=service.course.incarnation
        )
        service.queue.announce("rollouts", version)
        self.newest = publication.directory
        self._published[version] = publication.directory
        keep, schedule = service.config.checkpoint.keep_snapshots, service.config.evaluation_schedule
        kept = Kept.of(service.control.get(KEPT_KEY), service.course.incarnation)
        evaluated = {each for each in self._published if kept.needs(each, schedule)}
        for old in surplus(list(self._published), keep, self.pinned | evaluated):
            shutil.rmtree(self._published.pop(old), ignore_errors=True)
