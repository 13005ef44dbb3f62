"""Rounds of evaluation: asked, counted, complete, and what is said when they are not."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from relax.records import eval_uid, request_of
from relax.run.evaluation import EvaluationRounds
from relax.run.evaluation_schedule import KEPT_KEY, EvaluationSchedule

SCHEDULE = EvaluationSchedule(num_steps=100, interval_steps=10, versions=frozenset({7}), max_waiting=3)


class Board:
    """Where rounds are announced: remembers what was set, as the hub does."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}

    def set(self, key: str, value: Any) -> None:
        self.entries[key] = value


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def rounds(board) -> EvaluationRounds:
    return EvaluationRounds(board, SCHEDULE)  # type: ignore[arg-type]


def answers(request: int, *indices: int, version: int = 0, end: int | None = None) -> pa.Table:
    count = len(indices)
    return pa.table(
        {
            "uid": [f"{eval_uid(request, index)}/0" for index in indices],
            "policy_version_start": [version] * count,
            "policy_version_end": [version if end is None else end] * count,
            "evaluated_policy_version": [version] * count,
        }
    )


def complete(rounds: EvaluationRounds, request: int, version: int) -> None:
    """Let the one answer of a round come."""
    rounds.expect(request, 1)
    rounds.receive(answers(request, 0, version=version))


def test_uid_of_a_held_out_prompt_names_its_round():
    """Both ways, with the sample's number behind it or not."""
    assert eval_uid(12, 3) == "eval12-3"
    assert request_of("eval12-3/0") == 12


def test_round_is_complete_when_all_answers_are_there(rounds, board):
    """Whichever comes first, the number or the answers."""
    rounds.reach(0)
    assert board.entries["evaluate"] == {"request": 1, "policy_version": 0}
    rounds.receive(answers(1, 0, 1))
    assert rounds.is_open
    assert rounds.newly_complete() == []
    rounds.expect(1, 2)
    assert not rounds.is_open
    assert [each.request for each in rounds.newly_complete()] == [1]
    assert rounds.newly_complete() == []


def test_versions_wait_for_the_round_before(rounds, board):
    """Training runs ahead; each version of the schedule is asked in turn, and its weights are kept until it is done."""
    rounds.reach(0)
    rounds.reach(12)
    assert board.entries["evaluate"] == {"request": 1, "policy_version": 0}
    assert board.entries[KEPT_KEY] == {"seen": 12, "versions": [0, 7, 10], "incarnation": 0}
    complete(rounds, 1, 0)
    rounds.reach(12)
    assert board.entries["evaluate"] == {"request": 2, "policy_version": 7}
    assert board.entries[KEPT_KEY] == {"seen": 12, "versions": [7, 10], "incarnation": 0}
    complete(rounds, 2, 7)
    rounds.reach(13)
    complete(rounds, 3, 10)
    rounds.reach(13)
    assert board.entries["evaluate"] == {"request": 3, "policy_version": 10}
    assert [each.policy_version for each in rounds.newly_complete()] == [0, 7, 10]
    assert not rounds.is_open


def test_too_many_waiting_versions_are_left_out(rounds, board):
    """The oldest of the interval's; not the named one."""
    rounds.reach(0)
    rounds.reach(43)
    assert board.entries[KEPT_KEY]["versions"] == [0, 7, 30, 40]


def test_nothing_is_asked_without_held_out_prompts(board):
    """Nor are weights kept."""
    rounds = EvaluationRounds(board, EvaluationSchedule(num_steps=9, has_prompts=False))  # type: ignore[arg-type]
    rounds.reach(0)
    rounds.reach(9)
    assert not rounds.is_open
    assert "evaluate" not in board.entries
    assert board.entries[KEPT_KEY]["versions"] == []


@pytest.mark.parametrize("wrong", [{"version": 4}, {"version": 6}, {"version": 5, "end": 6}])
def test_answers_of_other_weights_do_not_count(board, wrong):
    """Older, newer, or begun by the right ones: they are left out, and nobody waits for others in their place."""
    rounds = EvaluationRounds(board, EvaluationSchedule(num_steps=5))  # type: ignore[arg-type]
    rounds.reach(0)
    complete(rounds, 1, 0)
    rounds.reach(5)
    rounds.expect(2, 2)
    rounds.receive(answers(2, 0, **wrong))
    rounds.receive(answers(2, 1, version=5))
    last = rounds.newly_complete()[-1]
    assert [row["uid"] for part in last.answers for row in part.to_pylist()] == ["eval2-1/0"]
    assert rounds.shortfall() == "got answers to 1 of 2 held-out prompts (1 refused)"


def test_refused_prompts_are_not_waited_for(rounds):
    """Row errors of held-out prompts count for their round, whichever role refused them; others do not."""
    rounds.reach(0)
    rounds.expect(1, 4)
    rounds.receive(answers(1, 0))
    rounds.refuse(["rollout/eval1-1", "rollout/0-1", "preprocess/data/eval1-2.jsonl:2", "rollout/eval1-2"])
    assert rounds.is_open
    rounds.refuse(["evaluation/eval1-3"])
    assert not rounds.is_open
    assert rounds.shortfall() == "got answers to 1 of 4 held-out prompts (3 refused)"


def test_shortfall_says_what_the_last_round_lacks(board):
    """Not asked, not prepared, nothing usable, answers missing, nothing missing."""
    rounds = EvaluationRounds(board, EvaluationSchedule(num_steps=9))  # type: ignore[arg-type]
    assert rounds.shortfall() == "was not asked for"
    rounds.reach(0)
    assert rounds.shortfall() == "was not prepared in time"
    rounds.expect(1, 0)
    assert not rounds.is_open
    assert rounds.shortfall() == "had no held-out prompt that could be used"
    rounds.reach(9)
    rounds.expect(2, 2)
    rounds.receive(answers(2, 0, version=9))
    assert rounds.shortfall() == "got answers to 1 of 2 held-out prompts"
    rounds.receive(answers(2, 1, version=9))
    assert rounds.shortfall() == ""


def test_rounds_go_back_with_the_run(rounds, board):
    """Later ones and the open one are given up; the version gone back to is asked under a number never used."""
    rounds.reach(0)
    complete(rounds, 1, 0)
    rounds.reach(12)
    complete(rounds, 2, 7)
    rounds.reach(12)
    assert len(rounds.newly_complete()) == 2
    rounds.go_back(8, incarnation=1)
    assert board.entries["evaluate"] == {"request": 1_000_001, "policy_version": 8}
    assert board.entries[KEPT_KEY] == {"seen": 8, "versions": [8], "incarnation": 1}
    complete(rounds, 3, 10)
    assert rounds.is_open
    complete(rounds, 1_000_001, 8)
    assert [each.policy_version for each in rounds.newly_complete()] == [8]
    rounds.reach(10)
    assert board.entries["evaluate"] == {"request": 1_000_002, "policy_version": 10}


def test_rounds_of_an_earlier_driver_count(rounds, board):
    """They are on disk: what is due comes after them."""
    rounds.take_up([0, 7, 10])
    rounds.go_back(10, incarnation=1)
    assert "evaluate" not in board.entries
    assert rounds.newly_complete() == []
    rounds.reach(19)
    assert "evaluate" not in board.entries
    rounds.reach(20)
    assert board.entries["evaluate"] == {"request": 1_000_001, "policy_version": 20}
