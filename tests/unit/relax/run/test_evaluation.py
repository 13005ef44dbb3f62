"""Rounds of evaluation: asked, counted, complete, and what is said when they are not."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from relax.records import eval_uid, request_of
from relax.run.evaluation import EvaluationRounds


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
    return EvaluationRounds(board, 10)  # type: ignore[arg-type]


def answers(request: int, *indices: int, version: int = 0) -> pa.Table:
    return pa.table(
        {
            "uid": [f"{eval_uid(request, index)}/0" for index in indices],
            "policy_version_start": [version] * len(indices),
        }
    )


def test_uid_of_a_held_out_prompt_names_its_round():
    """Both ways, with the sample's number behind it or not."""
    assert eval_uid(12, 3) == "eval12-3"
    assert request_of("eval12-3/0") == 12


def test_round_is_complete_when_all_answers_are_there(rounds, board):
    """Whichever comes first, the number or the answers."""
    rounds.ask(policy_version=0)
    assert board.entries["evaluate"] == {"request": 1, "policy_version": 0}
    rounds.receive(answers(1, 0, 1))
    assert not rounds.complete()
    assert rounds.newly_complete() == []
    rounds.expect(1, 2)
    assert rounds.complete()
    assert [each.request for each in rounds.newly_complete()] == [1]
    assert rounds.newly_complete() == []


def test_late_answers_go_to_their_own_round(rounds):
    """Two rounds may be on their way; they are handed on in order."""
    rounds.ask(0)
    rounds.ask(3)
    rounds.expect(1, 1)
    rounds.expect(2, 1)
    rounds.receive(answers(2, 0, version=3))
    assert rounds.newly_complete() == []
    rounds.receive(answers(1, 0))
    assert [each.policy_version for each in rounds.newly_complete()] == [0, 3]


def test_next_round_is_asked_after_the_interval_and_the_last_answer(rounds, board):
    """Not while one is open, not before the interval has passed."""
    rounds.ask_when_due(50)
    assert board.entries == {}
    rounds.ask(0)
    rounds.expect(1, 1)
    rounds.ask_when_due(10)
    assert board.entries["evaluate"]["request"] == 1
    rounds.receive(answers(1, 0))
    rounds.ask_when_due(9)
    assert board.entries["evaluate"]["request"] == 1
    rounds.ask_when_due(10)
    assert board.entries["evaluate"] == {"request": 2, "policy_version": 10}


def test_round_is_fresh_when_no_answer_is_older_than_its_weights(rounds):
    """An answer of the weights before asks for another round."""
    rounds.ask(5)
    rounds.expect(1, 2)
    rounds.receive(answers(1, 0, version=4))
    rounds.receive(answers(1, 1, version=5))
    assert not rounds.fresh()
    rounds.ask(5)
    rounds.expect(2, 1)
    rounds.receive(answers(2, 0, version=6))
    assert rounds.fresh()


def test_refused_prompts_are_not_waited_for(rounds):
    """Row errors of held-out prompts count for their round; others do not."""
    rounds.ask(0)
    rounds.expect(1, 3)
    rounds.receive(answers(1, 0))
    rounds.refuse(["rollout/eval1-1", "rollout/0-1", "preprocess/data/eval1-2.jsonl:2", "rollout/eval1-2"])
    assert rounds.complete()
    assert rounds.fresh()
    assert rounds.shortfall() == "got answers to 1 of 3 held-out prompts (2 refused)"


def test_shortfall_says_what_the_last_round_lacks(rounds):
    """Not prepared, nothing usable, answers missing, nothing missing."""
    rounds.ask(0)
    assert rounds.shortfall() == "was not prepared in time"
    rounds.expect(1, 0)
    assert rounds.complete()
    assert rounds.fresh()
    assert rounds.shortfall() == "had no held-out prompt that could be used"
    rounds.ask(0)
    rounds.expect(2, 2)
    rounds.receive(answers(2, 0))
    assert rounds.shortfall() == "got answers to 1 of 2 held-out prompts"
    rounds.receive(answers(2, 1))
    assert rounds.shortfall() == ""


def test_rounds_go_back_with_the_run(rounds, board):
    """Later ones and the open one are given up, and it is asked anew under a number that no answer has had."""
    for version in (0, 10, 20):
        rounds.ask(version)
    for request in (1, 2):
        rounds.expect(request, 1)
        rounds.receive(answers(request, 0))
    assert len(rounds.newly_complete()) == 2
    rounds.go_back(10, incarnation=1)
    assert board.entries["evaluate"] == {"request": 1_000_001, "policy_version": 10}
    rounds.receive(answers(3, 0))
    rounds.expect(3, 1)
    assert not rounds.complete()
    rounds.expect(1_000_001, 1)
    rounds.receive(answers(1_000_001, 0))
    assert [each.policy_version for each in rounds.newly_complete()] == [10]


def test_rounds_of_an_earlier_driver_count(rounds, board):
    """They are on disk: the next one is due an interval after the last of them."""
    rounds.take_up([0, 10])
    rounds.go_back(10, incarnation=1)
    assert board.entries == {}
    assert rounds.newly_complete() == []
    rounds.ask_when_due(19)
    assert board.entries == {}
    rounds.ask_when_due(20)
    assert board.entries["evaluate"] == {"request": 1_000_001, "policy_version": 20}
