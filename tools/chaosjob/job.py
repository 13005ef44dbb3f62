"""The main job as a user starts it, seen from outside: its processes, how far it has come, and what it printed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "pipelines" / "omni_grpo.py"
KILL_DEADLINE_S = 20.0
CONNECT_S = 0.2
_SNAPSHOT = re.compile(r"(\d{6,})(?:-(\d+))?")


class Standing(NamedTuple):
    """How far a run has come: its incarnation, then its policy version; compares as the run goes on."""

    incarnation: int
    version: int


class Job:
    """One run, over as many starts of the program as it takes.

    Args:
        home: Directory that the program runs in.
        run_dir: Of the run; its parent is `run_root`.
        words: Of the configuration.
    """

    def __init__(self, home: Path, run_dir: Path, words: Sequence[str]) -> None:
        self.home = home
        self.run_dir = run_dir
        self.output_path = home / f"{run_dir.name}.out"
        self.num_starts = 0
        self._words = [f"run_root={run_dir.parent}", f"name={run_dir.name}", *words]
        self._process: subprocess.Popen[bytes] | None = None
        self._starts_at = 0
        self._known: dict[int, str] = {}

    def start(self) -> None:
        """Begin the run."""
        self.output_path.unlink(missing_ok=True)
        self._launch(self._words)

    def resume(self) -> None:
        """Go on with it, as a user does."""
        self._launch([f"resume={self.run_dir}", "progress=plain"])

    def _launch(self, words: list[str]) -> None:
        with self.output_path.open("ab") as output:
            self._starts_at = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), *words],
                cwd=self.home,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.num_starts += 1

    def exit_code(self) -> int | None:
        """Return how the program ended, None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def last_output(self) -> str:
        """Return what the program printed since its last start."""
        with self.output_path.open("rb") as file:
            file.seek(self._starts_at)
            return file.read().decode(errors="replace")

    @property
    def pid(self) -> int:
        """Return the driver's process, 0 if there is none."""
        return 0 if self._process is None or self._process.poll() is not None else self._process.pid

    def pids(self) -> dict[str, int]:
        """Return the processes of the services by name: `queue`, `actor-0`, `rollout-1`, ..."""
        found = {}
        for child in self._children():
            if child.pid not in self._known and (name := _service_of(child)):
                self._known[child.pid] = name
            with suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE and child.pid in self._known:
                    found[self._known[child.pid]] = child.pid
        return found

    def _children(self) -> list[psutil.Process]:
        if not self.pid:
            return []
        with suppress(psutil.Error):
            return psutil.Process(self.pid).children()
        return []

    def kill_everything(self) -> None:
        """End every process of the run by SIGKILL, the driver first, and wait until they are gone."""
        if self._process is None:
            return
        family = []
        with suppress(psutil.Error):
            family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for each in family:
            with suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(family, KILL_DEADLINE_S)
        self._process.wait(KILL_DEADLINE_S)

    def standing(self) -> Standing:
        """Return the newest weights that were published; (0, -1) before the first."""
        found = [Standing(0, -1)]
        for path in (self.run_dir / "weights").glob("[0-9]*"):
            if match := _SNAPSHOT.fullmatch(path.name):
                found.append(Standing(int(match[2] or 0), int(match[1])))
        return max(found)

    def num_started(self, service: str) -> int:
        """Return how often a service has said that it has started; of the queue, whether it can be reached."""
        if service == "queue":
            return int(self._queue_answers())
        with suppress(OSError):
            return (self.run_dir / "logs" / f"{service}.log").read_bytes().count(b"started  ")
        return 0

    def _queue_answers(self) -> bool:
        try:
            host, _, port = (self.run_dir / "queue.uri").read_text().strip().rpartition(":")
            with socket.create_connection((host.removeprefix("grpc://"), int(port)), CONNECT_S):
                return True
        except (OSError, ValueError):
            return False

    def describe(self) -> str:
        """Return the end of what was printed and of every log."""
        logs = sorted((self.run_dir / "logs").glob("*.log"))
        ends = [f"--- {log.name}\n{log.read_text(errors='replace')[-2500:]}" for log in logs]
        return "\n".join([self.last_output[-4000:], *ends])


def environment() -> dict[str, str]:
    """Return what programs of this clone are started with, so that they import from it."""
    inherited = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(ROOT), *([inherited] if inherited else [])])
    return os.environ | {"PYTHONPATH": paths, "COLUMNS": "400"}


def _service_of(process: psutil.Process) -> str:
    """Return which service a process is, '' if it is none."""
    with suppress(psutil.Error):
        words = process.cmdline()
        for at in range(len(words) - 1):
            if words[at : at + 2] == ["flight", "serve"]:
                return "queue"
            if words[at] == "relax.roles" and "--index" in words:
                return f"{words[at + 1]}-{words[words.index('--index') + 1]}"
    return ""
