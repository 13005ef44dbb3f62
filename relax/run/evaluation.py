"""Rounds of held-out evaluation: who was asked when, what came back. It asks; the services answer through the queue.

A round is a request number. The preprocess role puts the held-out prompts under that number, the rollout role
answers them greedily, and the number of prompts comes back as the metric `eval/num_prompts`. A prompt that the
rollout role refuses is a row error and is not waited for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from relax.control.hub import ControlHub
from relax.records import request_of

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
    """All evaluations of a run; at most one is open at a time."""

    def __init__(self, hub: ControlHub, interval_steps: int) -> None:
        self._hub = hub
        self._interval_steps = interval_steps
        self._rounds: list[Round] = []
        self._num_handed_on = 0

    def ask(self, policy_version: int) -> None:
        """Open a round: every service that serves evaluations sees the request."""
        request = len(self._rounds) + 1
        self._rounds.append(Round(request, policy_version))
        self._hub.set("evaluate", {"request": request, "policy_version": policy_version})

    def ask_when_due(self, step: int) -> None:
        """Open a round when the interval has passed and the last one is complete."""
        if not self._interval_steps or not self._rounds or not self._rounds[-1].complete:
            return
        if step - self._rounds[-1].policy_version >= self._interval_steps:
            self.ask(step)

    def expect(self, request: int, num_prompts: int) -> None:
        """Note how many held-out prompts a round has."""
        self._rounds[request - 1].num_expected = num_prompts

    def receive(self, rows: pa.Table) -> None:
        """Sort answers into their rounds."""
        requests = pa.array([request_of(uid) for uid in rows["uid"].to_pylist()], pa.int64())
        for request in pc.unique(requests).to_pylist():
            self._rounds[request - 1].answers.append(rows.filter(pc.equal(requests, request)))

    def refuse(self, error_uids: Iterable[str]) -> None:
        """Note held-out prompts that will not be answered, given the uids of row errors of any kind."""
        for uid in error_uids:
            refused = _REFUSED.fullmatch(uid)
            if refused:
                self._rounds[request_of(refused[1]) - 1].num_refused += 1

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

    def all_answers(self) -> pa.Table | None:
        """Return the answers of every complete round, oldest first; None when there are none."""
        parts = [part for round_ in self._rounds if round_.complete for part in round_.answers]
        return pa.concat_tables(parts) if parts else None
