"""Starts services as processes of this machine, reports those that end and leaves none behind.

Life cycle of a service: `start` -> running -> reported once by `poll` (it ended by itself) or by `stop` (it
was told to). Each has a session and process group of its own, so that a signal reaches its children too and
Ctrl-C in the terminal does not reach it at all; whatever is left of a group when its leader ends is killed.
A guardian process kills all groups when the supervisor itself is killed.

Not for several threads at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from relax.errors import ServiceError
from relax.launch import guardian
from relax.launch.log_tail import find_error, read_tail

LAST_LINES = 20
POLL_INTERVAL_S = 0.01
SPAWN_DEADLINE_S = 30.0
KILL_DEADLINE_S = 5.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class Exited:
    """A service that has ended.

    returncode: as of `subprocess`, so -9 means killed by signal 9.
    last_lines: the end of what it wrote, oldest first.
    error: its own error line, taken from its log; empty when there is none.
    """

    name: str
    returncode: int
    log_path: Path
    last_lines: tuple[str, ...]
    error: str

    def __str__(self) -> str:
        if self.returncode < 0:
            how = f"was killed by {_signal_name(-self.returncode)}"
        else:
            how = f"exited with code {self.returncode}"
        cause = self.error or (self.last_lines[-1] if self.last_lines else "it wrote nothing")
        return (
            f"{self.name} {how}"
            if self.returncode == 0
            else f"{self.name} {how}: {cause} (log: {self.log_path})"
        )


@dataclass(frozen=True)
class _Service:
    process: subprocess.Popen[bytes]
    log_path: Path
    log_start: int  # bytes in the log before this start


class LocalSupervisor:
    """Owner of the service processes of one run; logs go to `run_dir/logs/<name>.log`, one start after another."""

    def __init__(self, run_dir: Path | str) -> None:
        self._log_dir = Path(run_dir) / "logs"
        self._services: dict[str, _Service] = {}
        self._guardian: subprocess.Popen[bytes] | None = None
        self._closed = False
        # The kernel's parent-death signal follows the thread that started the child: it has to last as long as we do.
        self._spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="supervisor-spawn")

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> int:
        """Start a service and return its pid.

        `env` is added to this process's environment. Standard output and error go to the log unbuffered;
        standard input is empty. A name whose service has ended may be used again.

        Raises:
            ServiceError: the name is malformed or running, the program cannot be started, or this is closed.
        """
        if self._closed:
            raise ServiceError(
                f"LocalSupervisor.start({name!r}): the supervisor must be open, got a closed one"
            )
        if not _NAME.fullmatch(name):
            raise ServiceError(
                f"LocalSupervisor.start: name must be letters, digits, '_', '.' and '-', got {name!r}"
            )
        if name in self._services:
            raise ServiceError(
                f"LocalSupervisor.start({name!r}): the name must be free, got one that is running or not yet "
                "reported; call poll() or stop() first"
            )
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log_path = self._log_dir / f"{name}.log"
        self._tell_guardian("")  # there before the first service
        with log_path.open("ab") as log:
            log_start = log.tell()
            process = self._spawn(
                name, list(argv), dict(os.environ) | {"PYTHONUNBUFFERED": "1"} | dict(env or {}), log.fileno()
            )
        self._services[name] = _Service(process, log_path, log_start)
        self._tell_guardian(f"+{process.pid}")
        return process.pid

    def running(self) -> dict[str, int]:
        """Return the pid of every service that was started and not reported as ended, by name."""
        return {name: service.process.pid for name, service in self._services.items()}

    def log_path(self, name: str) -> Path:
        """Return where a service of that name writes."""
        return self._log_dir / f"{name}.log"

    def poll(self, deadline_s: float = 0.0) -> list[Exited]:
        """Return the services that ended by themselves since the last call; wait up to `deadline_s` for one.

        Each is reported once, with code 0 too; its left-over children are killed.
        """
        end_s = time.monotonic() + deadline_s
        while True:
            exited = [self._finish(name) for name in list(self._services) if self._has_ended(name)]
            if exited or time.monotonic() >= end_s:
                return exited
            time.sleep(POLL_INTERVAL_S)

    def stop(self, names: Iterable[str] | None = None, grace_s: float = 5.0) -> list[Exited]:
        """End services (all by default): SIGTERM to each group, SIGKILL to what is left after `grace_s`.

        Returns the ends in the order asked; names that are not running are left out. `poll` does not report
        them.
        """
        asked = list(self._services) if names is None else [name for name in names if name in self._services]
        for name in asked:
            self._signal(name, signal.SIGTERM)
            self._signal(name, signal.SIGCONT)  # a stopped process would not see it
        self._wait(asked, grace_s)
        for name in asked:
            self._signal(name, signal.SIGKILL)
        self._wait(asked, KILL_DEADLINE_S)
        return [self._finish(name) for name in asked]

    def kill(self, name: str) -> None:
        """End a service by SIGKILL, its children too; `poll` reports it like one that ended by itself."""
        if name in self._services:
            self._signal(name, signal.SIGKILL)

    def close(self, grace_s: float = 1.0) -> None:
        """Stop all services and the guardian; safe to repeat."""
        if self._closed:
            return
        self._closed = True
        try:
            self.stop(grace_s=grace_s)
        finally:
            if self._guardian is not None and self._guardian.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._guardian.stdin.close()
                self._guardian.wait(KILL_DEADLINE_S)
            self._spawner.shutdown()

    def __enter__(self) -> LocalSupervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spawn(self, name: str, argv: list[str], env: dict[str, str], log_fd: int) -> subprocess.Popen[bytes]:
        def run() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

        try:
            return self._spawner.submit(run).result(SPAWN_DEADLINE_S)
        except (OSError, ValueError, IndexError) as error:
            raise ServiceError(
                f"LocalSupervisor.start({name!r}): argv must name a program that can be run, got {argv}: {error}"
            ) from error

    def _tell_guardian(self, line: str) -> None:
        if self._guardian is None or self._guardian.poll() is not None:
            if self._guardian is not None and self._guardian.stdin is not None:
                self._guardian.stdin.close()
            command = [sys.executable, "-I", "-S", guardian.__file__, str(os.getpid())]
            self._guardian = self._spawner.submit(
                subprocess.Popen,
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                bufsize=0,
            ).result(SPAWN_DEADLINE_S)
            line = "\n".join([*(f"+{service.process.pid}" for service in self._services.values()), line])
        if self._guardian.stdin is not None and line:
            with contextlib.suppress(BrokenPipeError):  # killed this instant; the next call starts another
                self._guardian.stdin.write(f"{line}\n".encode())

    def _has_ended(self, name: str) -> bool:
        """Whether the service has ended, without reaping it: until then its number cannot go to another process."""
        service = self._services[name]
        try:
            return os.waitid(os.P_PID, service.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # someone else reaped it
            return True

    def _signal(self, name: str, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._services[name].process.pid, number)

    def _wait(self, names: Iterable[str], deadline_s: float) -> None:
        end_s = time.monotonic() + deadline_s
        while not all(self._has_ended(name) for name in names) and time.monotonic() < end_s:
            time.sleep(POLL_INTERVAL_S)

    def _finish(self, name: str) -> Exited:
        """Kill what is left of the group, reap the leader and read the end of its log."""
        self._signal(name, signal.SIGKILL)
        service = self._services.pop(name)
        try:
            returncode = service.process.wait(KILL_DEADLINE_S)
        except subprocess.TimeoutExpired:  # stuck in the kernel: SIGKILL is pending
            returncode = -signal.SIGKILL
        self._tell_guardian(f"-{service.process.pid}")
        lines = read_tail(service.log_path, start=service.log_start)
        return Exited(
            name=name,
            returncode=returncode,
            log_path=service.log_path,
            last_lines=tuple(lines[-LAST_LINES:]),
            error=find_error(lines),
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
