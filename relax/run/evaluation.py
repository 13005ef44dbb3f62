"""Rounds of held-out evaluation: who was asked when, what came back. It asks; the services answer through the queue.

A round is a request number and a policy version. The preprocess role puts the held-out prompts under that number, the
rollout role (or services of their own) answers them greedily with the weights of exactly that version, and the number
of prompts comes back as the metric `eval/num_prompts`. A prompt that is refused is a row error and is not waited for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from relax.control.hub import ControlHub
from relax.records import EVALUATED_VERSION, request_of
from relax.run.evaluation_schedule import KEPT_KEY, EvaluationSchedule, Kept

MAX_ROUNDS = 1_000_000
"""Rounds of one incarnation of the run; requests of a later one have higher numbers."""
_REFUSED = re.compile(r"(?:rollout|evaluation)/(eval\d+-\d+)")
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
    """All evaluations of a run; at most one is open at a time. Answers to a round that was given up are ignored.

    Each is of exactly one policy version, those of the schedule in order; training goes on meanwhile, so that versions
    wait, whose snapshots the actor keeps for as long (`relax.run.evaluation_schedule`).
    """

    def __init__(self, hub: ControlHub, schedule: EvaluationSchedule, incarnation: int = 0) -> None:
        self._hub = hub
        self._schedule = schedule
        self._incarnation = incarnation
        self._rounds: list[Round] = []
        self._waiting: list[int] = []
        self._seen = -1
        self._num_handed_on = 0
        self.last_request = incarnation * MAX_ROUNDS
        """Number of the newest round."""

    def reach(self, policy_version: int) -> None:
        """Note that this version has come, and open the next round that is due if none is open."""
        if policy_version > self._seen:
            self._waiting += self._schedule.due(self._seen, policy_version)
            self._waiting = self._schedule.without_surplus(self._waiting)
            self._seen = policy_version
            self._keep()
        if self._waiting and not self._has_open_round:
            self._ask(self._waiting.pop(0))

    @property
    def is_open(self) -> bool:
        """Whether a round is open, or waits to be."""
        return self._has_open_round or bool(self._waiting)

    @property
    def _has_open_round(self) -> bool:
        return bool(self._rounds) and not self._rounds[-1].complete

    def _ask(self, policy_version: int) -> None:
        """Open a round: every service that serves evaluations sees the request."""
        self.last_request += 1
        self._rounds.append(Round(self.last_request, policy_version))
        self._keep()
        self._hub.set("evaluate", {"request": self.last_request, "policy_version": policy_version})

    def _keep(self) -> None:
        """Say which snapshots must stay."""
        open_ones = [each.policy_version for each in self._rounds[-1:] if not each.complete]
        kept = Kept(
            seen=self._seen, versions=frozenset((*open_ones, *self._waiting)), incarnation=self._incarnation
        )
        self._hub.set(KEPT_KEY, kept.to_value())

    def go_back(self, policy_version: int, incarnation: int) -> None:
        """Give up rounds of later versions, and what is open or waits, for its prompts and weights may be gone.

        If anything was given up, or the version that the run goes on from is to be evaluated and was not, that one is.
        """
        lost = self.is_open
        kept = [each for each in self._rounds if each.complete and each.policy_version <= policy_version]
        self._num_handed_on = sum(each in kept for each in self._rounds[: self._num_handed_on])
        self._rounds, self._waiting, self._seen = kept, [], policy_version
        self._incarnation = incarnation
        self.last_request = incarnation * MAX_ROUNDS
        is_due = self._schedule.wants(policy_version)
        if policy_version not in [each.policy_version for each in kept] and (lost or is_due or not kept):
            self._waiting = [policy_version] if self._schedule.has_prompts else []
        self._keep()
        self.reach(policy_version)

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
        """Sort answers into their rounds; those of other weights than their round's do not count."""
        requests = pa.array([request_of(uid) for uid in rows["uid"].to_pylist()], pa.int64())
        for request in pc.unique(requests).to_pylist():
            own = rows.filter(pc.equal(requests, request))
            for each in self._of(request):
                is_right = _are_of(own, each.policy_version)
                each.answers.append(own.filter(is_right))
                each.num_refused += own.num_rows - pc.sum(is_right).as_py()

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

    def shortfall(self) -> str:
        """Return what the newest round lacks, '' when every held-out prompt was answered."""
        if not self._rounds:
            return "was not asked for"
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


def _are_of(rows: pa.Table, policy_version: int) -> pa.ChunkedArray:
    """Return which rows were generated from end to end by the weights of a version, and answer for it."""
    names = (EVALUATED_VERSION, "policy_version_start", "policy_version_end")
    are_equal = [pc.equal(rows[name], policy_version) for name in names]
    return pc.and_(are_equal[0], pc.and_(are_equal[1], are_equal[2]))
