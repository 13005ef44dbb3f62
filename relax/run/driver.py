"""The driver: starts the roles of a run, follows it to its end and leaves a report. It touches no sample on the way.

    start -> training -> evaluation -> draining -> report          the actor has done its steps
                 \\-- first Ctrl-C --------^                         checkpoint and report, exit 0
                 \\-- a role dies for good, or second Ctrl-C -> stop  everything ends within seconds, exit not 0

It looks at the run only through the queue's tables, the control plane and the processes' exit codes. A role that dies
or hangs is started again (`relax.run.restarting`).

On a server that was there already (`queue.uri`) a run that ends well drops its tables; a failed one leaves them to be
looked at (see `relax.run.attachment`).
"""

from __future__ import annotations

import signal
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
from relax.control.course import COURSE_KEY
from relax.control.hub import ControlHub
from relax.errors import ServiceError
from relax.launch.local import Exited, LocalSupervisor
from relax.roles.config import SERVABLE
from relax.run.directory import CONTROL_URI, complete_records, held, said
from relax.run.evaluation import EvaluationRounds
from relax.run.going_back import fence, first_course, next_course, resume_course, take_back
from relax.run.history import ENDED, SCALED, History
from relax.run.ledger import Ledger
from relax.run.restarting import QUEUE, Hands, Restarter
from relax.run.scaling import Scaling, ScalingHands
from relax.run.security import RunSecurity
from relax.run.services import Services
from relax.run.snapshots import weights_home
from relax.run.watch import RunWatch

TICK_S = 0.2
START_DEADLINE_S = 120.0
JOIN_DEADLINE_S = 300.0
"""Longest time from the first start of the services until all of them have sent a heartbeat."""
DRAIN_DEADLINE_S = 60.0
GENERATING = ("rollout-", "evaluation-")
"""Services that live on when the run goes back, without what they have in hand."""
LAST_RECORDS_S = 2.0
"""Time that the recorder gets when the run has failed."""


class StopNowError(Exception):
    """The user asked twice to end the run."""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """That a run goes on in its directory, from a step or from its newest checkpoint."""

    step: int | None = None


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
        self,
        config: RunConfig,
        specs: Mapping[str, TableSpec],
        run_dir: Path,
        model_dir: Path,
        resume: Resume | None = None,
    ) -> None:
        self._config = config
        self._specs = specs
        self._run_dir = run_dir
        self._model_dir = model_dir
        self._resume = resume
        self._history = History(run_dir)
        self._ledger: dict[str, int] | None = None
        self._is_open = False
        self._interrupts = 0
        self._expected_exits: set[str] = set()
        self._finished: set[str] = set()

    def run(self) -> Outcome:
        """Carry the run through and leave nothing half-written; never raises for what a role or the user did."""
        previous = signal.signal(signal.SIGINT, self._interrupt)
        try:
            with held(self._run_dir), weights_home(self._run_dir, self._config.weights.where):
                with ExitStack() as stack:
                    outcome = self._follow(stack)
                complete_records(self._run_dir)
                self._history.add(ENDED, outcome.reason, exit_code=outcome.exit_code, ledger=self._ledger)
        except OSError as error:
            raise ServiceError(
                f"run: {self._run_dir} must be written to, got: {error}; resume={self._run_dir} goes on"
            ) from error
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
            reason = str(error) if isinstance(error, ServiceError) else f"queue: {error}"
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
        self._security = RunSecurity.make(config, self._run_dir)
        self._hub = ControlHub(keys=self._security.hub_keys)
        stack.callback(self._hub.close)
        self._supervisor = LocalSupervisor(self._run_dir)
        stack.callback(self._supervisor.close)
        self._services = Services(
            config, self._run_dir, self._model_dir, self._supervisor, self._hub, self._security
        )
        hands = Hands(
            start=self._start_again,
            restart_queue=config.keeps_journal,
            go_back=self._go_back if config.can_go_back else None,
            tell=lambda text: self._watch.note(text),
        )
        self._restarter = Restarter(config.restarts, self._supervisor, self._hub, self._history, hands)
        self._hub.set("phase", "run")
        if self._resume is not None:
            complete_records(self._run_dir)  # what a driver that was killed has left
        self._services.queue_uri = uri = config.queue.uri or self._start_queue()
        look = f"python -m flight ls --uri {uri}{self._security.look_words}"
        print(f"queue: {uri}  (look into it with: {look})", flush=True)
        self._queue = QueueClient(uri, identity="driver", credentials=self._security.credentials("driver"))
        stack.callback(self._queue.close)
        if self._resume is not None:
            course = resume_course(self._queue, self._run_dir, self._history, self._resume.step)
        else:
            course = first_course(self._queue, self._specs, self._history, can_go_back=config.can_go_back)
        self._hub.set(COURSE_KEY, course.to_value())
        self._evaluations = EvaluationRounds(self._hub, config.evaluation_schedule, course.incarnation)
        self._watch = RunWatch(
            config, self._run_dir, self._queue, self._hub, self._evaluations, self._history
        )
        stack.callback(self._watch.close)
        if self._resume is not None:
            self._watch.take_up()
            self._watch.go_back(course)
        self._scaling = self._open_scaling(stack)
        self._is_open = True
        self._restarter.attend(self._queue)
        for name in self._services.names():
            self._services.start(name)
        self._until(self._all_joined, JOIN_DEADLINE_S, "every service to join the control plane")

    def _open_scaling(self, stack: ExitStack) -> Scaling:
        """Say where the control plane is, and follow what is wanted there."""
        stack.enter_context(said(self._run_dir / CONTROL_URI, self._hub.uri))
        print(f"control: {self._hub.uri}  (scale: python -m relax.run.scale --run {self._run_dir} rollout=N)")

        def tell(text: str) -> None:
            self._history.add(SCALED, text, step=self._watch.step)
            self._watch.note(text)

        hands = ScalingHands(running=self._supervisor.running, give_back=self._queue.void, tell=tell)
        return Scaling(self._config, self._hub, self._services, hands)

    # ---- restarts ---------------------------------------------------------------------------------------------

    def _start_again(self, name: str) -> None:
        is_wanted = name in (QUEUE, *self._services.names()) and name not in self._finished
        if name in self._supervisor.running() or not is_wanted:
            return
        if name == QUEUE:
            self._services.start_queue()
        else:
            self._services.start(name)
        self._watch.show_restart(name)

    def _go_back(self) -> None:
        """Go on from the newest checkpoint with a new actor; see `relax.run.going_back`."""
        standing = self._services.names("preprocess", "recorder", "actor", *self._config.roles.services)
        course = next_course(self._queue, self._run_dir, self._history)
        self._supervisor.stop(standing, grace_s=0.0)
        generating = [name for name in self._services.names() if name.startswith(GENERATING)]
        fence(self._hub, self._supervisor, generating, course)
        take_back(self._queue, self._run_dir, course.step)
        self._watch.go_back(course)
        self._services.meet_anew()
        for name in standing:
            if name not in self._finished:
                self._services.start(name)
        self._watch.show_restart("actor")
        self._watch.note(f"went back to step {course.step}; the actor is started again")

    # ---- services ---------------------------------------------------------------------------------------------

    def _all_joined(self) -> bool:
        """Whether nothing more needs to be waited for: a service that joins after Ctrl-C finds that it has to leave."""
        joined = {name.replace("/", "-") for name in self._hub.members()}
        return self._interrupts > 0 or joined >= set(self._services.names())

    def _start_queue(self) -> str:
        uri_file = self._run_dir / "queue.uri"
        self._services.start_queue()
        self._until(uri_file.is_file, START_DEADLINE_S, "the queue to listen")
        return uri_file.read_text().strip()

    def _train(self) -> None:
        """Follow the run until the actor has left with a checkpoint, asking for evaluations on the way."""
        self._expected_exits |= set(self._services.names("actor"))
        asked_to_drain = False
        if self._resume is None:
            self._evaluations.reach(0)
        while not self._gone("actor"):
            self._tick()
            self._evaluations.reach(self._watch.step)
            if self._interrupts and not asked_to_drain:
                self._watch.note("draining: finishing the step in hand (Ctrl-C again stops at once)")
                for role in ("preprocess", "rollout", "actor"):
                    self._leave(role)
                asked_to_drain = True
        self._until(lambda: self._restarter.collect(self._watch), DRAIN_DEADLINE_S, "the queue to answer")
        if not self._interrupts and self._watch.step < self._config.num_steps:
            raise ServiceError(
                f"the actor must do all {self._config.num_steps} steps, got an end after step {self._watch.step}; "
                f"see {self._run_dir}/logs"
            )

    def _evaluate_last(self) -> str:
        """Wait until the versions that are still to be evaluated are, the final one last; return what is to be said.

        Answers that do not come cost the evaluation, not the run.
        """
        if not self._config.data.eval:
            return ""
        self._watch.note("evaluating the final weights")
        deadline_s = self._config.evaluation.deadline_s

        self._evaluations.reach(self._watch.step)
        while self._evaluations.is_open and not self._interrupts:
            request = self._evaluations.last_request

            def is_over(request: int = request) -> bool:
                self._evaluations.reach(self._watch.step)
                going_on = self._evaluations.is_open and self._evaluations.last_request == request
                return not going_on or self._interrupts > 0

            if not self._within(is_over, deadline_s):
                break
        shortfall = self._evaluations.shortfall()
        if self._interrupts:
            return "; Ctrl-C ended the last evaluation"
        return f"; the last evaluation {shortfall}" if shortfall else ""

    def _drain(self) -> None:
        """End the roles in the order of the data, so that everything trained on is recorded."""
        evaluators = ("evaluation",) if self._config.num_evaluators else ()
        for role in ("preprocess", "rollout", "actor", *evaluators):
            self._leave(role)
        producers = self._services.names("preprocess", "rollout", *evaluators)
        self._finished |= self._restarter.waiting() & set(
            producers
        )  # who is dead need not come back only to leave
        if not self._within(lambda: self._finished >= set(producers), DRAIN_DEADLINE_S):
            # What they have in hand will not be trained on: no reason to lose the run.
            self._supervisor.stop(producers)
        for role in self._config.roles.services:
            self._leave(role)
            if not self._within(lambda role=role: self._gone(role), DRAIN_DEADLINE_S):  # type: ignore[misc]  # a lambda with a default
                self._supervisor.stop(self._services.names(role))
        self._leave("recorder")
        self._until(lambda: self._gone("recorder"), DRAIN_DEADLINE_S, "the recorder to finish")
        self._until(lambda: self._restarter.collect(self._watch), DRAIN_DEADLINE_S, "the queue to answer")
        tables = (self._queue.stats("prompts"), self._queue.stats("rollouts"))
        self._ledger = Ledger.of(*tables, self._config.group_size).to_facts()
        if self._config.queue.uri is not None:
            for name in reversed(list(self._specs)):  # rows refer to those of the tables before
                self._queue.drop_table(name)

    def _leave(self, role: str) -> None:
        if role == "rollout":
            self._scaling.end()
        self._expected_exits |= set(self._services.names(role))
        self._hub.set(f"phase/{role}", "drain")

    def _gone(self, *roles: str) -> bool:
        return self._finished >= set(self._services.names(*roles))

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
        reason = self._death()
        if reason:
            raise ServiceError(reason)
        if self._is_open:
            self._restarter.tick()
            self._scaling.tick()
            self._restarter.collect(self._watch)
        time.sleep(TICK_S)

    def _death(self) -> str:
        """Return why the run cannot go on, or ''; of several deaths one by a signal, else the first that was started.

        Ranks of the actor that lose a neighbour end with an error of their own, right after it.
        """
        reason = ""
        for gone in sorted(self._supervisor.poll(), key=lambda gone: gone.returncode >= 0):
            if self._is_open and self._scaling.has_left(gone.name):
                continue
            if self._is_wanted(gone):
                self._finished.add(gone.name)
            elif not reason:
                reason = self._restarter.died(gone)
        return reason

    def _is_wanted(self, gone: Exited) -> bool:
        """Whether a service may be gone for good: it was asked to leave, and leaves nothing undone."""
        may_break_off = ("preprocess", "rollout", "evaluation", *SERVABLE)
        has_nothing_to_finish = gone.name.rpartition("-")[0] in may_break_off
        return gone.name in self._expected_exits and (gone.returncode == 0 or has_nothing_to_finish)
