"""Workers side by side: start one a system, let them take turns inside each round, collect what they measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from busbench import workloads as w
from busbench.processes import descendants, end_all, readable
from busbench.systems import queue_options

TOOLS = Path(__file__).resolve().parents[1]
START_S = 120.0
COMMAND_S = 120.0
MIN_FILL_ROWS_PER_S = 2000

Samples = dict[str, list[dict[str, Any]]]
"""Per system, one dictionary a round: put_s, take_s (lists), cpu_s, server_cpu_s or rows_per_s."""


@dataclass
class Result:
    """What one workload gave. `skipped` says why a system has no samples."""

    workload: str
    title: str
    nbytes: int
    num_rows: int
    scale: float
    samples: Samples = field(default_factory=dict)
    peak_bytes: dict[str, int | None] = field(default_factory=dict)
    fill_s: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


class Worker:
    """The process of one system, asked one thing at a time, each with a deadline."""

    def __init__(self, system: str, python: Path, workload: w.Workload, directory: Path) -> None:
        self.system = system
        self._log = (directory / f"{system}_{workload.name}.log").open("w+")
        environment = os.environ | {
            "PYTHONPATH": f"{TOOLS}:{TOOLS.parent}",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }
        arguments = [system, workload.name, str(directory), str(workload.group_size)]
        self._process = subprocess.Popen(
            [str(python), "-m", "busbench.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Wait until the system runs."""
        self._answer("start", START_S)

    def ask(self, verb: str, deadline_s: float = COMMAND_S, **arguments: Any) -> dict[str, Any]:
        """Give a command and return its answer.

        Raises:
            RuntimeError: the worker failed, or is too slow.
        """
        if self._process.stdin is None:
            raise RuntimeError(f"{self.system}: has no input")
        try:
            self._process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RuntimeError(f"{verb}: the worker must run, got {error}; {self._last_line()}") from error
        return self._answer(verb, deadline_s)

    def _answer(self, verb: str, deadline_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        if stdout is None or not readable(stdout, deadline_s):
            raise RuntimeError(f"{verb}: must be done in {deadline_s:.0f} s, got nothing")
        line = stdout.readline()
        answer = json.loads(line) if line else {"error": f"the worker ended; {self._last_line()}"}
        if "error" in answer:
            raise RuntimeError(f"{verb}: {answer['error']}")
        return answer

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return f"its last line: {lines[-1][:200]}" if lines else "it said nothing"

    def close(self) -> None:
        """End the worker and all that it started."""
        below = descendants(self._process.pid)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        end_all(below)
        self._log.close()


@dataclass(frozen=True)
class Plan:
    """How a workload is measured. `variants` are arguments of the same system, measured side by side.

    repeats: how often a round moves the workload, at most; small ones more often, so that a round is long enough.
    """

    rounds: int
    repeats: int
    budget_s: float = 2.0
    clients: tuple[int, ...] = ()
    table_rows: tuple[int, ...] = ()


def missing(system: str) -> str:
    """Return why this release cannot run a system; empty if it can."""
    if system == "ours_shm" and queue_options(shared_memory=True) is None:
        return "not there yet: `QueueClient` has no shared-memory path"
    return ""


def measure(
    workload: w.Workload, pythons: Mapping[str, Path | str], plan: Plan, scale: float, directory: Path
) -> Result:
    """Run all rounds of one workload; `pythons` maps a system to its interpreter, or to the reason to skip it."""
    result = Result(workload.name, workload.describe(), workload.nbytes, workload.rows.num_rows, scale)
    w.write(workload, directory)
    expected = w.source_digest(workload)
    workers: dict[str, Worker] = {}
    try:
        for system, python in pythons.items():
            if isinstance(python, str):
                result.skipped[system] = python
                continue
            for label in [f"{system} {rows}" for rows in plan.table_rows] or [system]:
                workers[label] = Worker(system, python, workload, directory)
        for label in list(workers):
            with _skip_if_it_fails(label, workers, result):
                workers[label].wait_ready()
                _check(workers[label], expected)
                if plan.table_rows:
                    num_rows = int(label.split()[1])
                    deadline_s = COMMAND_S + num_rows / MIN_FILL_ROWS_PER_S
                    answer = workers[label].ask("fill", deadline_s, num_rows=num_rows)
                    result.fill_s[label] = answer["fill_s"]
        for number in range(-1, plan.rounds):  # Round -1 warms up.
            for label in list(workers):
                with _skip_if_it_fails(label, workers, result):
                    _one_turn(workers[label], label, plan, result, keep=number >= 0)
        for label in list(workers):
            with _skip_if_it_fails(label, workers, result):
                result.peak_bytes[label] = workers[label].ask("memory")["peak_bytes"]
    finally:
        for worker in workers.values():
            worker.close()
        for path in directory.glob("*.arrow"):
            path.unlink()
    return result


def _one_turn(worker: Worker, label: str, plan: Plan, result: Result, *, keep: bool) -> None:
    if plan.clients:
        answers = {
            f"{label} {count}": worker.ask("clients", num_clients=count, repeats=plan.repeats)
            for count in plan.clients
        }
    else:
        answers = {label: worker.ask("round", repeats=plan.repeats, budget_s=plan.budget_s)}
    if keep:
        for name, answer in answers.items():
            result.samples.setdefault(name, []).append(answer)


def _check(worker: Worker, expected: str) -> None:
    found = worker.ask("verify")["digest"]
    if found != expected:
        raise RuntimeError(f"received bytes must have the digest {expected}, got {found}")


@contextmanager
def _skip_if_it_fails(label: str, workers: dict[str, Worker], result: Result) -> Iterator[None]:
    """Note a worker's failure, end the worker, and go on with the others."""
    try:
        yield
    except RuntimeError as error:
        result.skipped[label] = str(error)
        for name in [name for name in result.samples if name == label or name.startswith(f"{label} ")]:
            del result.samples[name]
        print(f"{result.workload}: {label} skipped: {error}", file=sys.stderr, flush=True)
        workers.pop(label).close()
