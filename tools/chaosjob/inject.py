"""Does to a run what a fault says. Each call returns when the fault is over, and leaves no limit and no stop behind."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from chaosjob import journals, plan, room, sockets
from chaosjob.job import Job, Standing
from chaosjob.plan import Fault, Kind

STOPPED_S, RUNNING_S = 0.08, 0.02
"""Turns of a process that is slowed: it gets a fifth of its time."""
CUT_AGAIN_S = 0.4
CHECKPOINT_DEADLINE_S = 30.0
LOOK_S = 0.001
HANG_DEADLINE_S = 90.0


class MissedError(Exception):
    """There was nobody to meet: the service is not running, or what was waited for did not come."""


@dataclass(frozen=True, kw_only=True)
class Injected:
    """What was done."""

    service: str
    """The service that it met, '' if none alone."""
    pid: int
    began_at: float
    """When it was done, by `time.monotonic`; of what lasts and undoes itself, when it was over."""
    standing: Standing
    num_started: int
    """How often the service had said that it has started."""
    what: str = ""


def inject(fault: Fault, job: Job, place: room.Room) -> Injected:
    """Do it; blocks for as long as it lasts.

    Raises:
        MissedError: it met nobody.
    """
    service, pid = _meet(fault, job)
    num_started = job.num_started(service) if service else 0
    standing = job.standing()
    began_at = time.monotonic()
    what = ""
    match fault.kind:
        case Kind.KILL:
            _kill(fault, job, pid)
        case Kind.KILL_IN_CHECKPOINT:
            what = _kill_in_checkpoint(fault, job, pid)
            began_at = time.monotonic()
        case Kind.HANG:
            _hang(pid)
        case Kind.TORN_JOURNAL | Kind.DAMAGED_JOURNAL:
            what = _change_journal(fault, job, pid)
        case _:
            with suppress(ProcessLookupError):
                _last(fault, job, pid, place)
            began_at = time.monotonic()
    return Injected(
        service=service,
        pid=pid,
        began_at=began_at,
        standing=standing,
        num_started=num_started,
        what=what,
    )


def _meet(fault: Fault, job: Job) -> tuple[str, int]:
    """Return the service that a fault meets and its process; ('', driver's) if it meets the program or the machine."""
    if not job.pid:
        raise MissedError("the program has ended")
    if fault.target in (plan.DRIVER, plan.EVERYTHING, plan.HOST):
        return "", job.pid
    pids = job.pids()
    names = sorted(name for name in pids if name == fault.target or name.startswith(f"{fault.target}-"))
    if not names:
        raise MissedError(f"no {fault.target} is running")
    name = names[int(fault.draw * len(names))]
    return name, pids[name]


def _kill(fault: Fault, job: Job, pid: int) -> None:
    if fault.target == plan.EVERYTHING:
        job.kill_everything()
    else:
        _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise MissedError("it ended at that moment") from None


def _kill_in_checkpoint(fault: Fault, job: Job, pid: int) -> str:
    """Wait until a checkpoint is being written, then kill."""
    began_at = time.monotonic()
    while not (seen := _unfinished_checkpoint(job.run_dir)):
        if time.monotonic() - began_at > CHECKPOINT_DEADLINE_S or not job.pid:
            raise MissedError("no checkpoint was written")
        time.sleep(LOOK_S)
    _kill(fault, job, pid)
    return seen


def _unfinished_checkpoint(run_dir: Path) -> str:
    """Return the sign of a checkpoint that is being written, '' if there is none."""
    signs = (
        ("journal", "*.prepared"),
        ("journal", "*.prepared.draft"),
        ("checkpoint/megatron", ".*.partial"),
    )
    for directory, pattern in signs:
        for path in (run_dir / directory).glob(pattern):
            return path.name
    return ""


def _hang(pid: int) -> None:
    """Stop a process for good; return when somebody has ended it."""
    _signal(pid, signal.SIGSTOP)
    ends_at = time.monotonic() + HANG_DEADLINE_S
    try:
        while Path(f"/proc/{pid}").exists() and not _is_zombie(pid):
            if time.monotonic() > ends_at:
                raise TimeoutError(f"a stopped process must be killed for its silence, got {pid} still there")
            time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _is_zombie(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def _change_journal(fault: Fault, job: Job, pid: int) -> str:
    """Change the journal while its server stands still, then kill it: the next one finds it changed."""
    change: Callable[[Path, float], str] = (
        journals.tear if fault.kind == Kind.TORN_JOURNAL else journals.damage
    )
    with _stopped(pid):
        what = change(job.run_dir / "journal", fault.draw)
        if not what:
            raise MissedError("no decision could be damaged that a checkpoint does not need")
        _signal(pid, signal.SIGKILL)
    return what


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    _signal(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _last(fault: Fault, job: Job, pid: int, place: room.Room) -> None:
    """Do what lasts for a time and undoes itself."""
    ends_at = time.monotonic() + fault.hold_s
    match fault.kind:
        case Kind.STOP:
            with _stopped(pid):
                time.sleep(fault.hold_s)
        case Kind.SLOW:
            while time.monotonic() < ends_at:
                with _stopped(pid):
                    time.sleep(STOPPED_S)
                time.sleep(RUNNING_S)
        case Kind.CUT:
            source = random.Random(fault.draw)
            sockets.cut(pid)
            while time.monotonic() < ends_at:
                time.sleep(source.uniform(0.0, 2 * CUT_AGAIN_S))
                sockets.cut(pid)
        case Kind.BROKEN_DISK:
            with _no_writes(pid):
                time.sleep(fault.hold_s)
        case Kind.FULL_DISK:
            place.stay_full(job.run_dir, fault.hold_s)
        case Kind.FULL_SHM:
            place.stay_full(room.SHM, fault.hold_s)
        case _:
            raise ValueError(f"fault: {fault.kind} must be one that lasts")


@contextmanager
def _no_writes(pid: int) -> Iterator[None]:
    """Let every write of a process to a file fail (EFBIG), and no shared memory of its be made larger."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
