"""One run under faults, from its start to its checked books. Decides nothing at random: the faults come from a plan.

    start -> faults, one after another, some before the last was got over -> the run ends -> its books are checked
               \\-- it was killed whole, or ended with an error that a fault may cause --> resume

A fault counts as got over when the service that it met is there again (another process, if it was killed) and the run
has published weights since. The time until then is the time to recover.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from chaosjob import plan
from chaosjob.books import Books, read_books
from chaosjob.inject import Injected, MissedError, inject
from chaosjob.job import Job, Standing, environment
from chaosjob.plan import Fault, Kind
from chaosjob.room import Room

TICK_S = 0.05
MAX_OPEN = 6
"""Faults that the run has not got over yet, beyond which the next one waits."""
FSCK_DEADLINE_S = 120.0
DAMAGED = "damaged place(s)"
"""What a server says of a journal that it refuses to start on."""


class ChaosError(Exception):
    """The run did not do what is promised; the message says what."""


@dataclass(kw_only=True)
class Met:
    """A fault and what became of it."""

    fault: Fault
    injected: Injected | None = None
    recovery_s: float | None = None
    missed: str = ""
    """Why it met nobody, '' if it did."""
    notes: list[str] = field(default_factory=list)
    num_resumes: int = 0
    _back_at: Standing | None = None
    """How far the run was when the service was there again."""


@dataclass(kw_only=True)
class RunRecord:
    """A run that was put under faults."""

    name: str
    seed: int
    met: list[Met] = field(default_factory=list)
    num_resumes: int = 0
    books: Books = field(default_factory=Books)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def counted(self) -> list[Met]:
        """Return the faults that met somebody."""
        return [each for each in self.met if each.injected is not None]


class Campaign:
    """Puts faults on one job.

    Args:
        job: Not started yet.
        faults: Which come, in order.
        wanted: Asked before each fault whether there is to be another one.
        room: Where it lies.
        deadline_s: Longest time to recover from a fault, and from the start to the first step.
        say: Told what happens, line by line.
    """

    def __init__(
        self,
        job: Job,
        faults: Iterator[Fault],
        wanted: Callable[[], bool],
        *,
        room: Room,
        deadline_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._job = job
        self._faults = faults
        self._wanted = wanted
        self._room = room
        self._deadline_s = deadline_s
        self._say = say
        self._open: list[tuple[Met, Future[Injected]]] = []
        self._threads = ThreadPoolExecutor(max_workers=MAX_OPEN, thread_name_prefix="fault")

    def run(self, record: RunRecord) -> None:
        """Carry the run through, checks included; what does not hold is in `record.problems` afterwards."""
        began_at = time.monotonic()
        try:
            self._job.start()
            self._until_first_step()
            self._put_faults(record)
            self._check_end(record)
        except ChaosError as error:
            record.problems.append(str(error))
        finally:
            self._job.kill_everything()
            self._threads.shutdown(wait=True)
            record.num_resumes = self._job.num_starts - 1
            record.seconds = time.monotonic() - began_at

    def _until_first_step(self) -> None:
        ends_at = time.monotonic() + self._deadline_s
        while self._job.standing().version < 1:
            if self._job.exit_code() is not None:
                raise ChaosError(f"the run must begin, got its end: {_last_line(self._job.last_output)}")
            if time.monotonic() > ends_at:
                raise ChaosError(f"the run must make a step within {self._deadline_s:.0f} s, got none")
            time.sleep(TICK_S)

    def _put_faults(self, record: RunRecord) -> None:
        """Put one fault after another until the program has ended well."""
        following = next(self._faults)
        due_at = time.monotonic() + following.gap_s
        while True:
            code = self._job.exit_code()
            if code == 0:
                return
            if code is not None:
                self._go_on(code)
            self._look()
            if time.monotonic() >= due_at and self._may_come(following) and self._wanted():
                self._put(record, following)
                following = next(self._faults)
                due_at = time.monotonic() + following.gap_s
            time.sleep(TICK_S)

    def _may_come(self, fault: Fault) -> bool:
        open_faults = [met.fault for met, _ in self._open]
        if fault.is_alone or any(each.is_alone for each in open_faults):
            return not open_faults
        return len(open_faults) < MAX_OPEN and not any(each.target == fault.target for each in open_faults)

    def _put(self, record: RunRecord, fault: Fault) -> None:
        met = Met(fault=fault)
        record.met.append(met)
        if fault.kind in (Kind.FULL_DISK, Kind.FULL_SHM) and not self._room.is_private:
            met.missed = "this machine lets nobody have a small disk of his own"
            return
        self._say(f"fault {fault}  (run at {_place(self._job.standing())})")
        self._open.append((met, self._threads.submit(inject, fault, self._job, self._room)))

    # ---- what follows -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Note the faults that the run has got over."""
        for met, future in list(self._open):
            if not future.done():
                continue
            if met.injected is None and not self._note_injected(met, future):
                self._open.remove((met, future))
            elif met.injected is not None and self._is_over(met, met.injected):
                met.recovery_s = time.monotonic() - met.injected.began_at
                self._say(f"  {met.fault.number} got over after {met.recovery_s:.1f} s")
                self._open.remove((met, future))
            elif met.injected is not None and time.monotonic() - met.injected.began_at > self._deadline_s:
                raise ChaosError(
                    f"fault {met.fault} ({met.injected.service or 'run'}): the run must get over it within "
                    f"{self._deadline_s:.0f} s, got no {'step' if met._back_at else 'service'}"
                )

    def _note_injected(self, met: Met, future: Future[Injected]) -> bool:
        """Take what an injection says of itself; return whether it met somebody."""
        try:
            met.injected = future.result()
        except MissedError as error:
            met.missed = str(error)
            self._say(f"  {met.fault.number} met nobody: {met.missed}")
            return False
        except TimeoutError as error:
            raise ChaosError(f"fault {met.fault}: {error}") from error
        if met.injected.what:
            met.notes.append(met.injected.what)
            self._say(f"  {met.fault.number}: {met.injected.what}")
        return True

    def _is_over(self, met: Met, injected: Injected) -> bool:
        """Whether the service is there and the run has made a step since."""
        standing = self._job.standing()
        if met._back_at is None:
            if not self._is_back(met, injected):
                return False
            met._back_at = standing
        return standing > met._back_at

    def _is_back(self, met: Met, injected: Injected) -> bool:
        fault = met.fault
        if fault.kind == Kind.DAMAGED_JOURNAL or fault.target == plan.EVERYTHING:
            return met.num_resumes > 0 and bool(self._job.pid) and "actor-0" in self._job.pids()
        if not injected.service:
            return bool(self._job.pid)
        pid = self._job.pids().get(injected.service, 0)
        if fault.kind not in plan.REPLACES:
            return pid > 0
        if pid in (0, injected.pid):
            return False
        num_before = 0 if injected.service == plan.QUEUE else injected.num_started
        return self._job.num_started(injected.service) > num_before

    # ---- ends -------------------------------------------------------------------------------------------------

    def _go_on(self, code: int) -> None:
        """Resume a run that a fault may have ended.

        Raises:
            ChaosError: none of the present ones may.
        """
        for _, future in self._open:  # what is full or broken is over before the next start
            while not future.done():
                time.sleep(TICK_S)
        self._look_at_injections()
        causes = [met for met, _ in self._open if met.fault.is_alone]
        said = _last_line(self._job.last_output)
        if not causes:
            raise ChaosError(f"the run must go on by itself, got its end with code {code}: {said}")
        met = causes[0]
        if met.num_resumes:
            raise ChaosError(f"fault {met.fault}: a resumed run must go on, got code {code}: {said}")
        met.num_resumes += 1
        if met.fault.kind == Kind.DAMAGED_JOURNAL:
            self._repair(met)
        elif met.fault.target != plan.EVERYTHING:
            met.notes.append(f"the run ended and was resumed: {said}")
            self._say(f"  the run ended: {said}")
        self._job.kill_everything()
        self._job.resume()

    def _look_at_injections(self) -> None:
        for met, future in list(self._open):
            if met.injected is None and not self._note_injected(met, future):
                self._open.remove((met, future))

    def _repair(self, met: Met) -> None:
        """Check that the run ended for the right reason, and do what its error says.

        Raises:
            ChaosError: it gave another reason, or the journal cannot be repaired.
        """
        said = self._job.last_output
        if DAMAGED not in said:
            raise ChaosError(
                f"fault {met.fault}: the run must say that its journal is damaged, got: {_last_line(said)}"
            )
        words = [sys.executable, "-m", "flight", "fsck", str(self._job.run_dir / "journal"), "--repair"]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=FSCK_DEADLINE_S, env=environment(), check=False
        )
        if done.returncode:
            raise ChaosError(
                f"fault {met.fault}: fsck must repair the journal, got: {done.stdout}{done.stderr}"
            )
        met.notes.append("refused by the server, repaired by fsck, resumed")
        self._say("  the server refused the journal; fsck repaired it")

    def _check_end(self, record: RunRecord) -> None:
        """Take the run's end for the recovery of what is still open, and read its books."""
        for met, future in self._open:
            if met.injected is None and not self._note_injected(met, future):
                continue
            if met.injected is not None:
                met.recovery_s = max(0.0, time.monotonic() - met.injected.began_at)
        self._open.clear()
        record.books = read_books(self._job.run_dir)
        record.problems += record.books.problems


def _place(standing: Standing) -> str:
    back = f", {standing.incarnation} times back" if standing.incarnation else ""
    return f"step {standing.version}{back}"


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1][:600] if lines else "nothing"
