"""Rounds of held-out evaluation: who was asked when, what came back. It asks; the services answer through the queue.

A round is a request number. The preprocess role puts the held-out prompts under that number, the rollout role
answers them greedily, and the number of prompts comes back as the metric `eval/num_prompts`. A prompt that the
rollout role refuses is a row error and is not waited for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from relax.control.hub import ControlHub
from relax.records import request_of

MAX_ROUNDS = 1_000_000
"""Rounds of one incarnation of the run; requests of a later one have higher numbers."""
_REFUSED = re.compile(r"rollout/(eval\d+-\d+)")
"""Uid of a row error for a held-out prompt."""


@dataclass
class Round:
    """One evaluation: asked at a policy version, expected and received answers."""

    request: int
    policy_version: int
    num_expected: int | None = None
    num_refused: int = 0
    answers: list[pa.Table] = field(default_factory=list)

    @property
    def num_received(self) -> int:
        return sum(part.num_rows for part in self.answers)

    @property
    def complete(self) -> bool:
        return self.num_expected is not None and self.num_received + self.num_refused >= self.num_expected


class EvaluationRounds:
    """All evaluations of a run; at most one is open at a time. Answers to a round that was given up are ignored."""

    def __init__(self, hub: ControlHub, interval_steps: int, incarnation: int = 0) -> None:
        self._hub = hub
        self._interval_steps = interval_steps
        self._rounds: list[Round] = []
        self._num_handed_on = 0
        self._last_request = incarnation * MAX_ROUNDS

    def ask(self, policy_version: int) -> None:
        """Open a round: every service that serves evaluations sees the request."""
        self._last_request += 1
        request = self._last_request
        self._rounds.append(Round(request, policy_version))
        self._hub.set("evaluate", {"request": request, "policy_version": policy_version})

    def ask_when_due(self, step: int) -> None:
        """Open a round when the interval has passed and the last one is complete."""
        if not self._interval_steps or not self._rounds or not self._rounds[-1].complete:
            return
        if step - self._rounds[-1].policy_version >= self._interval_steps:
            self.ask(step)

    def ask_last(self, policy_version: int, wait: Callable[[], bool]) -> str:
        """Ask once more of the final weights and wait; return what is missing, '' if nothing is.

        `wait` returns whether the answers came. Those that do not cost the evaluation, not the run.
        """
        for _ in range(2):  # a worker may have answered a prompt before it adopted the last version
            self.ask(policy_version)
            if not wait() or self.fresh():
                break
        return self.shortfall()

    def go_back(self, policy_version: int, incarnation: int) -> None:
        """Give up rounds of later versions, and what is open, for its prompts may be gone; that is asked anew."""
        is_open = bool(self._rounds) and not self._rounds[-1].complete
        kept = [each for each in self._rounds if each.complete and each.policy_version <= policy_version]
        self._num_handed_on = sum(each in kept for each in self._rounds[: self._num_handed_on])
        self._rounds = kept
        self._last_request = incarnation * MAX_ROUNDS
        if is_open or not kept:
            self.ask(policy_version)

    def take_up(self, policy_versions: Iterable[int]) -> None:
        """Count evaluations of an earlier driver, whose answers are on disk."""
        done = [Round(0, version, num_expected=0) for version in sorted(policy_versions)]
        self._rounds = [*done, *self._rounds]
        self._num_handed_on += len(done)

    def expect(self, request: int, num_prompts: int) -> None:
        """Note how many held-out prompts a round has."""
        for each in self._of(request):
            each.num_expected = num_prompts

    def receive(self, rows: pa.Table) -> None:
        """Sort answers into their rounds."""
        requests = pa.array([request_of(uid) for uid in rows["uid"].to_pylist()], pa.int64())
        for request in pc.unique(requests).to_pylist():
            for each in self._of(request):
                each.answers.append(rows.filter(pc.equal(requests, request)))

    def refuse(self, error_uids: Iterable[str]) -> None:
        """Note held-out prompts that will not be answered, given the uids of row errors of any kind."""
        for uid in error_uids:
            refused = _REFUSED.fullmatch(uid)
            if refused:
                for each in self._of(request_of(refused[1])):
                    each.num_refused += 1

    def _of(self, request: int) -> list[Round]:
        return [each for each in self._rounds if each.request == request]

    def newly_complete(self) -> list[Round]:
        """Return the rounds that became complete since the last call, oldest first."""
        first = self._num_handed_on
        while self._num_handed_on < len(self._rounds) and self._rounds[self._num_handed_on].complete:
            self._num_handed_on += 1
        return self._rounds[first : self._num_handed_on]

    def complete(self) -> bool:
        """Whether the newest round has all its answers."""
        return bool(self._rounds) and self._rounds[-1].complete

    def fresh(self) -> bool:
        """Whether the newest round was answered wholly by the weights it asked for, or newer ones."""
        last = self._rounds[-1]
        oldest = [pc.min(part["policy_version_start"]).as_py() for part in last.answers]
        return last.complete and all(version >= last.policy_version for version in oldest)

    def shortfall(self) -> str:
        """Return what the newest round lacks, '' when every held-out prompt was answered."""
        last = self._rounds[-1]
        if last.num_expected is None:
            return "was not prepared in time"
        if not last.num_expected:
            return "had no held-out prompt that could be used"
        if last.num_received >= last.num_expected:
            return ""
        return (
            f"got answers to {last.num_received} of {last.num_expected} held-out prompts"
            f"{f' ({last.num_refused} refused)' if last.num_refused else ''}"
        )
