"""Rounds of held-out evaluation: who was asked when, what came back. It asks; the services answer through the queue.

A round is a request number. The preprocess role puts the held-out prompts under that number, the rollout role
answers them greedily, and the number of prompts comes back as the metric `eval/num_prompts`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from relax.control.hub import ControlHub

EXPECTED_METRIC = "eval/num_prompts"


def eval_uid(request: int, prompt_index: int) -> str:
    """Return the uid of a held-out prompt in round `request`."""
    return f"eval{request}-{prompt_index}"


def request_of(uid: str) -> int:
    """Return the round that `uid` belongs to."""
    return int(uid.removeprefix("eval").split("-", 1)[0])


@dataclass
class Round:
    """One evaluation: asked at a policy version, expected and received answers."""

    request: int
    policy_version: int
    num_expected: int | None = None
    answers: list[pa.Table] = field(default_factory=list)

    @property
    def num_received(self) -> int:
        return sum(part.num_rows for part in self.answers)

    @property
    def complete(self) -> bool:
        return self.num_expected is not None and self.num_received >= self.num_expected


class EvaluationRounds:
    """All evaluations of a run; at most one is open at a time."""

    def __init__(self, hub: ControlHub, interval_steps: int) -> None:
        self._hub = hub
        self._interval_steps = interval_steps
        self._rounds: list[Round] = []

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

    def receive(self, rows: pa.Table) -> list[Round]:
        """Sort answers into their rounds; return the rounds that became complete."""
        requests = pa.array([request_of(uid) for uid in rows["uid"].to_pylist()], pa.int64())
        completed = []
        for request in pc.unique(requests).to_pylist():
            round_ = self._rounds[request - 1]
            was_complete = round_.complete
            round_.answers.append(rows.filter(pc.equal(requests, request)))
            if round_.complete and not was_complete:
                completed.append(round_)
        return completed

    def complete(self) -> bool:
        """Whether the newest round has all its answers."""
        return bool(self._rounds) and self._rounds[-1].complete

    def fresh(self) -> bool:
        """Whether the newest round was answered wholly by the weights it asked for, or newer ones."""
        last = self._rounds[-1]
        oldest = (
            min(pc.min(part["policy_version_start"]).as_py() for part in last.answers) if last.answers else 0
        )
        return last.complete and oldest >= last.policy_version

    def all_answers(self) -> pa.Table | None:
        """Return the answers of every complete round, oldest first; None when there are none."""
        parts = [part for round_ in self._rounds if round_.complete for part in round_.answers]
        return pa.concat_tables(parts) if parts else None
