"""The training program as users start it: a process in a directory of its own, watched from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = REPOSITORY / "pipelines" / "omni_grpo.py"
PLUGINS = REPOSITORY / "tests" / "kit" / "plugins"
DEPTH_EXAMPLE = REPOSITORY / "examples" / "depth_modality"
RUN_DEADLINE_S = 150.0
MARK = "RELAX_TEST_JOB"
POLL_S = 0.05

NUM_STEPS, PROMPTS_PER_STEP, GROUP_SIZE = 3, 4, 4
SMALL = (
    "progress=plain",
    f"num_steps={NUM_STEPS}",
    f"prompts_per_step={PROMPTS_PER_STEP}",
    f"group_size={GROUP_SIZE}",
    "evaluation.max_prompts=6",
    "evaluation.deadline_s=60",
    "actor.warmup_steps=0",
    "rollout.reward=my_rewards:half",
)


def _environment() -> dict[str, str]:
    paths = os.pathsep.join(str(path) for path in (REPOSITORY, PLUGINS, DEPTH_EXAMPLE))
    return os.environ | {"PYTHONPATH": paths, "COLUMNS": "400"}


ENTRY = ([sys.executable, str(PROGRAM)], _environment())
"""Command and environment of the program, for runs that end before they have begun."""


@dataclass(frozen=True)
class Job:
    """A program that was started: it, its output so far, and all the processes that it has."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    output_path: Path
    mark: str

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        return self.output.rstrip().splitlines()[-1]

    def wait(self, deadline_s: float = RUN_DEADLINE_S) -> int:
        """Return the exit code, or fail with the output when the deadline has passed."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {deadline_s} s:\n{self.describe()}") from None

    def until(self, condition: Callable[[], bool], deadline_s: float = RUN_DEADLINE_S) -> None:
        """Wait until the condition holds; fail when the program ends before or the deadline passes."""
        end_s = time.monotonic() + deadline_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end_s:
                raise AssertionError(f"it did not come to that:\n{self.describe()}")
            time.sleep(POLL_S)

    def until_step(self, step: int, deadline_s: float = RUN_DEADLINE_S) -> None:
        """Wait until the weights after that optimizer step, or a later one, are published."""

        def is_published() -> bool:
            return any(int(path.name[:6]) >= step for path in (self.run_dir / "weights").glob("[0-9]*"))

        self.until(is_published, deadline_s)

    def processes(self) -> list[psutil.Process]:
        """Return every live process that has this job's mark in its environment, the program included."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def pid_of(self, role: str) -> int:
        """Return the process of a role, or 0 before it has one."""
        words = ["flight", "serve"] if role == "queue" else ["relax.roles", role]
        for process in self.processes():
            with suppress(psutil.Error):
                command = process.cmdline()
                if any(command[at : at + 2] == words for at in range(len(command))):
                    return process.pid
        return 0

    def kill(self, role: str) -> None:
        """End a role by SIGKILL as soon as it has a process."""
        self.until(lambda: self.pid_of(role) > 0)
        os.kill(self.pid_of(role), signal.SIGKILL)

    def interrupt(self) -> None:
        """Do what Ctrl-C in a terminal does: SIGINT to the program's whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def all_gone(self, deadline_s: float) -> bool:
        """Whether no process is left by the deadline."""
        end_s = time.monotonic() + deadline_s
        while self.processes():
            if time.monotonic() > end_s:
                return False
            time.sleep(POLL_S)
        return True

    def describe(self) -> str:
        """Return the output and the end of every log."""
        logs = sorted((self.run_dir / "logs").glob("*.log"))
        ends = [f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs]
        return "\n".join([self.output, *ends])


@contextmanager
def start_job(directory: Path, *words: str, name: str = "job") -> Iterator[Job]:
    """Run `omni_grpo.py` with small numbers and `words` in `directory`; whatever is left of it is killed at the end."""
    with _started(directory, name, [*SMALL, f"name={name}", *words]) as job:
        yield job


@contextmanager
def resume_job(directory: Path, name: str, *words: str) -> Iterator[Job]:
    """Go on with the job of that name, as `start_job` starts one."""
    with _started(directory, name, [f"resume=runs/{name}", "progress=plain", *words]) as job:
        yield job


@contextmanager
def _started(directory: Path, name: str, words: list[str]) -> Iterator[Job]:
    mark = uuid.uuid4().hex
    output_path = directory / f"{name}.out"
    command = [sys.executable, str(PROGRAM), *words]
    environment = _environment() | {MARK: mark}
    with output_path.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    job = Job(process, directory / "runs" / name, output_path, mark)
    try:
        yield job
    finally:
        for left in job.processes():
            with suppress(psutil.Error):
                left.kill()
        process.wait(10)


def toy_words(home: Path) -> list[str]:
    """Return the words that name the data set and the model that fixture `job_home` made."""
    return [
        f"data.manifest={home}/toy/train.jsonl",
        f"data.eval.toy={home}/toy/eval.jsonl",
        f"model.path={home}/model",
    ]


def half_written(directory: Path) -> list[str]:
    """Return what a run must not leave: hidden and unfinished files, and the parts of merged ones."""
    return [
        path.relative_to(directory).as_posix()
        for path in sorted(directory.rglob("*"))
        if (
            path.name.startswith(".") and path.name != ".metadata"
        )  # Megatron's name for a checkpoint's index
        or path.suffix in (".partial", ".unfinished", ".tmp")
        or path.name in ("queue.uri", "metrics")
    ]


def shared_memory() -> set[str]:
    """Return the names in /dev/shm."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
