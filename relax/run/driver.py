"""The driver: starts the roles of a run, follows it to its end and leaves a report. It touches no sample on the way.

    start -> training -> evaluation -> draining -> report          the actor has done its steps
                 \\-- first Ctrl-C --------^                         checkpoint and report, exit 0
                 \\-- a role dies, or second Ctrl-C -> stop          everything ends within seconds, exit not 0

It looks at the run only through the queue's tables, the control plane and the processes' exit codes.

On a server that was there already (`queue.uri`) a run that ends well drops its tables; a failed one leaves them to be
looked at (see `relax.run.attachment`).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import pyarrow as pa

from flight.client import QueueClient
from flight.errors import FlightQueueError
from flight.schema import TableSpec
from relax.config import RunConfig
from relax.control.hub import ControlHub
from relax.errors import ServiceError
from relax.launch.local import LocalSupervisor
from relax.launch.ranks import Rendezvous
from relax.run.directory import complete_records
from relax.run.evaluation import EvaluationRounds
from relax.run.watch import RunWatch

TICK_S = 0.2
USUAL_QUEUE_PORT = 8815
START_DEADLINE_S = 120.0
JOIN_DEADLINE_S = 300.0
"""Longest time from the start of a service to its first heartbeat: the libraries are read from disk."""
SILENCE_DEADLINE_S = 60.0
"""Longest silence of a service whose process is there, such as one that was stopped by a signal."""
DRAIN_DEADLINE_S = 60.0
LAST_RECORDS_S = 2.0
"""Time that the recorder gets when the run has failed."""


class StopNowError(Exception):
    """The user asked twice to end the run."""


@dataclass(kw_only=True)
class Outcome:
    """How a run ended."""

    exit_code: int
    reason: str
    rewards: Mapping[str, float] = field(default_factory=dict)
    report: Path | None = None
    row_errors: pa.Table | None = None
    """Rows that were refused: stage, place, reason."""


class Driver:
    """One run from the first process to the report."""

    def __init__(
        self, config: RunConfig, specs: Mapping[str, TableSpec], run_dir: Path, model_dir: Path
    ) -> None:
        self._config = config
        self._specs = specs
        self._run_dir = run_dir
        self._model_dir = model_dir
        self._is_open = False
        self._interrupts = 0
        self._expected_exits: set[str] = set()
        self._finished: set[str] = set()

    def run(self) -> Outcome:
        """Carry the run through and leave nothing half-written; never raises for what a role or the user did."""
        previous = signal.signal(signal.SIGINT, self._interrupt)
        try:
            with ExitStack() as stack:
                outcome = self._follow(stack)
            complete_records(self._run_dir)
        finally:
            signal.signal(signal.SIGINT, previous)
        if self._is_open:
            outcome.row_errors = self._watch.row_errors()
        return outcome

    def _follow(self, stack: ExitStack) -> Outcome:
        try:
            self._open(stack)
            self._train()
            reason = "drained on Ctrl-C" if self._interrupts else f"all steps done{self._evaluate_last()}"
            self._drain()
        except StopNowError:
            return Outcome(exit_code=130, reason="stopped at once on the second Ctrl-C")
        except (ServiceError, FlightQueueError) as error:
            reason = str(error) if isinstance(error, ServiceError) else self._death() or f"queue: {error}"
            self._collect_what_is_left(reason)
            return Outcome(exit_code=1, reason=reason)
        report = self._watch.report(reason)
        return Outcome(exit_code=0, reason=reason, rewards=self._watch.last_rewards(), report=report)

    def _collect_what_is_left(self, reason: str) -> None:
        """After a failure: row errors that may explain it, and what the recorder has not written yet."""
        if not self._is_open:
            return
        with suppress(FlightQueueError):
            self._watch.collect()
        self._watch.note(reason)
        self._hub.set("phase/recorder", "drain")
        end = time.monotonic() + LAST_RECORDS_S
        while "recorder-0" in self._supervisor.running() and time.monotonic() < end:
            self._supervisor.poll(TICK_S)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1

    def _open(self, stack: ExitStack) -> None:
        """Start the hub, the queue and every role, in the order in which they need each other."""
        config = self._config
        self._hub = ControlHub()
        stack.callback(self._hub.close)
        self._supervisor = LocalSupervisor(self._run_dir)
        stack.callback(self._supervisor.close)
        self._hub.set("phase", "run")
        uri = config.queue.uri or self._start_queue()
        print(f"queue: {uri}  (look into it with: python -m flight ls --uri {uri})", flush=True)
        self._queue = QueueClient(uri, identity="driver")
        stack.callback(self._queue.close)
        for spec in self._specs.values():
            self._queue.create_table(spec, exist_ok=False)
        self._evaluations = EvaluationRounds(self._hub, config.evaluation.interval_steps)
        self._watch = RunWatch(config, self._run_dir, self._queue, self._hub, self._evaluations)
        stack.callback(self._watch.close)
        self._is_open = True
        self._rendezvous = Rendezvous.on_this_machine(config.actor.num_procs)
        for role, count in self._roles().items():
            for index in range(count):
                self._start_role(role, index, uri)
        self._until(self._all_joined, JOIN_DEADLINE_S, "every service to join the control plane")

    def _all_joined(self) -> bool:
        """Whether nothing more needs to be waited for: a service that joins after Ctrl-C finds that it has to leave."""
        if self._interrupts:
            return True
        joined = {name.replace("/", "-") for name in self._hub.members()}
        return joined >= set(self._names(*self._roles()))

    def _names(self, *roles: str) -> list[str]:
        return [f"{role}-{index}" for role in roles for index in range(self._roles()[role])]

    def _roles(self) -> dict[str, int]:
        return {
            "actor": self._config.actor.num_procs,
            "rollout": self._config.rollout.num_workers,
            "preprocess": self._config.data.num_workers,
            "recorder": 1,
        }

    def _start_queue(self) -> str:
        uri_file = self._run_dir / "queue.uri"
        words = [
            "-m",
            "flight",
            "serve",
            "--port",
            str(_usual_port_if_free()),
            "--uri-file",
            str(uri_file),
            "--parent-pid",
            str(os.getpid()),
        ]
        self._supervisor.start("queue", [sys.executable, *words])
        self._until(uri_file.is_file, START_DEADLINE_S, "the queue to listen")
        return uri_file.read_text().strip()

    def _start_role(self, role: str, index: int, uri: str) -> None:
        words = ["-m", "relax.roles", role, "--index", str(index), "--run-dir", str(self._run_dir)]
        words += ["--model-dir", str(self._model_dir), "--queue", uri, "--control", self._hub.uri]
        words += ["--parent-pid", str(os.getpid())]
        threads = self._config.rollout.num_threads if role == "rollout" else self._config.actor.num_threads
        env = {"OMP_NUM_THREADS": str(threads if role in ("rollout", "actor") else 1)}
        env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if role == "actor":
            env |= self._rendezvous.environment(index)
        self._supervisor.start(f"{role}-{index}", [sys.executable, *words], env=env)

    def _train(self) -> None:
        """Follow the run until the actor has left with a checkpoint, asking for evaluations on the way."""
        self._expected_exits |= set(self._names("actor"))
        asked_to_drain = False
        if self._config.data.eval:
            self._evaluations.ask(policy_version=0)
        while not self._gone("actor"):
            self._tick()
            if self._config.data.eval:
                self._evaluations.ask_when_due(self._watch.step)
            if self._interrupts and not asked_to_drain:
                self._watch.note("draining: finishing the step in hand (Ctrl-C again stops at once)")
                for role in ("preprocess", "rollout", "actor"):
                    self._leave(role)
                asked_to_drain = True
        self._watch.collect()
        if not self._interrupts and self._watch.step < self._config.num_steps:
            raise ServiceError(
                f"the actor must do all {self._config.num_steps} steps, got an end after step {self._watch.step}; "
                f"see {self._run_dir}/logs"
            )

    def _evaluate_last(self) -> str:
        """Ask the held-out prompts once more of the final weights, wait, and return what is to be said of it.

        Answers that do not come cost the evaluation, not the run.
        """
        if not self._config.data.eval:
            return ""
        self._watch.note("evaluating the final weights")
        deadline_s = self._config.evaluation.deadline_s
        for _ in range(2):  # a worker may have answered a prompt before it adopted the last version
            self._evaluations.ask(policy_version=self._watch.step)
            came = self._within(lambda: self._evaluations.complete() or self._interrupts > 0, deadline_s)
            if self._interrupts:
                return "; Ctrl-C ended the last evaluation"
            if not came or self._evaluations.fresh():
                break
        shortfall = self._evaluations.shortfall()
        return f"; the last evaluation {shortfall}" if shortfall else ""

    def _drain(self) -> None:
        """End the roles in the order of the data, so that everything trained on is recorded."""
        for role in ("preprocess", "rollout", "actor"):
            self._leave(role)
        if not self._within(lambda: self._gone("preprocess", "rollout"), DRAIN_DEADLINE_S):
            # What they have in hand will not be trained on: no reason to lose the run.
            self._supervisor.stop(self._names("preprocess", "rollout"))
        self._leave("recorder")
        self._until(lambda: self._gone("recorder"), DRAIN_DEADLINE_S, "the recorder to finish")
        self._watch.collect()
        if self._config.queue.uri is not None:
            for name in reversed(list(self._specs)):  # rows refer to those of the tables before
                self._queue.drop_table(name)

    def _leave(self, role: str) -> None:
        self._expected_exits |= set(self._names(role))
        self._hub.set(f"phase/{role}", "drain")

    def _gone(self, *roles: str) -> bool:
        return self._finished >= set(self._names(*roles))

    def _until(self, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
        if not self._within(condition, deadline_s):
            raise ServiceError(
                f"driver: waited {deadline_s:.0f} s for {what}, got nothing; see {self._run_dir}/logs"
            )

    def _within(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        """Wait until the condition holds; return whether it did before the deadline."""
        end = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > end:
                return False
            self._tick()
        return True

    def _tick(self) -> None:
        """Look at the processes, collect what came, redraw; raise when a role died or the user wants out."""
        if self._interrupts > 1:
            raise StopNowError
        reason = self._death() or self._silence()
        if reason:
            raise ServiceError(reason)
        if self._is_open:
            self._watch.collect()
        time.sleep(TICK_S)

    def _death(self) -> str:
        """Return why the run cannot go on, or ''; of several deaths one by a signal, else the first that was started.

        Ranks of the actor that lose a neighbour end with an error of their own, right after it.
        """
        reason = ""
        for gone in sorted(self._supervisor.poll(), key=lambda gone: gone.returncode >= 0):
            if gone.returncode == 0 and gone.name in self._expected_exits:
                self._finished.add(gone.name)
            elif not reason:
                reason = str(gone) + (", though nobody had asked it to leave" if gone.returncode == 0 else "")
        return reason

    def _silence(self) -> str:
        """Return which service has a process and yet gave no sign of life for too long, or ''."""
        now = time.monotonic()
        for member in self._hub.members().values():
            silent_s = now - member.last_heartbeat_s
            name = f"{member.role}-{member.index}"
            if member.state == "lost" and silent_s > SILENCE_DEADLINE_S and name not in self._finished:
                return f"{name} must send heartbeats, got silence for {silent_s:.0f} s (process {member.pid})"
        return ""


def _usual_port_if_free() -> int:
    """Return the port that `python -m flight` looks at by default, or 0 (any) when another server has it."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", USUAL_QUEUE_PORT))
        except OSError:
            return 0
    return USUAL_QUEUE_PORT
