"""The checks of a run's books: rows that are right pass, and each kind of loss is found."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from relax.run.ledger import Ledger

ROOT = Path(__file__).resolve().parents[3]
NUM_STEPS, PROMPTS, GROUP = 3, 2, 2
LEDGER = Ledger(
    prompts_issued=8,
    prompts_answered=6,
    prompts_waiting=2,
    prompts_refused=0,
    rows_generated=12,
    rows_trained=12,
    rows_waiting=0,
    rows_dropped=0,
    group_size=GROUP,
)


@pytest.fixture(autouse=True)
def _tools_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tool's parts be imported as they are when it runs."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


@pytest.fixture
def expected():
    """What the rows below were made by."""
    from chaosjob.books import Expected

    return Expected(num_steps=NUM_STEPS, prompts_per_step=PROMPTS, group_size=GROUP, max_staleness=1)


def rows() -> pa.Table:
    """The rows of three steps of two prompts, two answers each; one version old from the second step on."""
    made = []
    for step, prompt, sample in itertools.product(range(1, NUM_STEPS + 1), range(PROMPTS), range(GROUP)):
        start = max(0, step - 2)
        group = f"0-{(step - 1) * PROMPTS + prompt}"
        made.append(
            {
                "uid": f"{group}/{sample}",
                "group_id": group,
                "optimizer_step": step,
                "trained_policy_version": step - 1,
                "policy_version_start": start,
                "policy_version_end": start,
                "staleness": step - 1 - start,
                "reward": float(step == NUM_STEPS),
            }
        )
    return pa.Table.from_pylist(made)


def metrics(steps=(1, 2, 3)) -> pa.Table:
    """The reward that the actor measured after each step, a second apart."""
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    return pa.table(
        {
            "role": ["actor"] * len(steps),
            "name": ["reward/mean"] * len(steps),
            "step": list(steps),
            "time": [begin + timedelta(seconds=at) for at in range(len(steps))],
        }
    )


def order() -> list[list[str]]:
    """The prompts as they are drawn."""
    return [[f"0-{row}" for row in range(20)]]


def changed(table: pa.Table, row: int, **values) -> pa.Table:
    made = table.to_pylist()
    made[row] |= values
    return pa.Table.from_pylist(made, table.schema)


def test_books_that_are_right_have_no_problem(expected):
    """All checks pass on what a run leaves."""
    from chaosjob import books

    assert books.check_rows(rows(), expected) == []
    assert books.check_ledger(LEDGER, expected) == []
    assert books.check_metrics(metrics(), expected) == []
    assert books.check_order(rows(), order(), LEDGER.to_facts()) == []
    assert books.last_reward(rows(), NUM_STEPS) == 1.0


def test_check_rows_finds_a_lost_row(expected):
    """Its step is short, and so is its group."""
    from chaosjob.books import check_rows

    found = check_rows(rows().slice(1), expected)
    assert found == [
        "steps: each must have 4 rows, got 1: 3",
        "groups: each must be 2 rows of one step, got 0-0: [1]",
    ]


def test_check_rows_finds_a_row_that_was_trained_on_twice(expected):
    """In the same step or another."""
    from chaosjob.books import check_rows

    twice = pa.concat_tables(
        [rows(), changed(rows(), 0, optimizer_step=3, trained_policy_version=2).slice(0, 1)]
    )
    found = check_rows(twice, expected)
    assert found[0] == "rows: each must be recorded once, got 1 twice or more: ['0-0/0']"
    assert "steps: each must have 4 rows, got 3: 5" in found


def test_check_rows_finds_a_missing_step(expected):
    """And one beyond the last."""
    from chaosjob.books import check_rows

    without = rows().filter(pc.not_equal(rows()["optimizer_step"], 2))
    assert check_rows(without, expected) == ["steps: each must have 4 rows, got 2: 0"]
    assert check_rows(rows(), replace(expected, num_steps=2)) == ["steps: must be 1 to 2, got [3]"]


def test_check_rows_finds_versions_that_cannot_be(expected):
    """Weights of another step, a row that is too old, an age that is no difference."""
    from chaosjob.books import check_rows

    table = changed(rows(), 0, trained_policy_version=1)
    assert "versions: its version must be the one before its step, got 1 rows: ['0-0/0']" in check_rows(
        table, expected
    )
    table = changed(rows(), 11, policy_version_start=0, policy_version_end=0, staleness=2)
    assert check_rows(table, expected) == ["versions: its age must be at most 1, got 1 rows: ['0-5/1']"]
    table = changed(rows(), 11, policy_version_end=3)
    assert check_rows(table, expected) == [
        "versions: its versions must grow from its start to its end and its training, got 1 rows: ['0-5/1']"
    ]


def test_check_ledger_finds_a_lost_prompt_and_rows_not_trained(expected):
    """By the equation that fails, and by the number of rows."""
    from chaosjob.books import check_ledger

    lost = replace(LEDGER, prompts_waiting=1, rows_trained=10, rows_dropped=2)
    assert check_ledger(lost, expected) == [
        "ledger: prompts differ by 1",
        "ledger: rows trained must be 12, got 10",
    ]


def test_check_metrics_finds_steps_missing_doubled_or_late(expected):
    """Each step is measured once, in the order of time."""
    from chaosjob.books import check_metrics

    assert check_metrics(metrics((1, 3)), expected) == ["metrics: each step must be measured once, got 2: 0"]
    assert check_metrics(metrics((1, 2, 2, 3)), expected) == [
        "metrics: each step must be measured once, got 2: 2"
    ]
    assert check_metrics(metrics((2, 1, 3)), expected) == [
        "metrics: steps must follow one another in time, got [1] late"
    ]


def test_check_order_finds_a_prompt_that_was_never_put(expected):
    """A hole in the order that nothing accounts for; the queue's own books would not know."""
    from chaosjob.books import check_order

    jumped = [["0-0", "0-1", "0-98", "0-99", "0-97", *order()[0][2:]]]
    assert check_order(rows(), jumped, LEDGER.to_facts()) == [
        "prompts: at most 2 before the last trained one may be waiting, refused or dropped, "
        "got 3: ['0-98', '0-99', '0-97']"
    ]
    assert check_order(rows(), [["0-0", "0-1"]], LEDGER.to_facts()) == [
        "prompts: each trained one must be of the order, got ['0-2', '0-3', '0-4', '0-5']"
    ]


def test_check_order_knows_the_shares_of_several_services(expected):
    """Each draws every other prompt, and none of them has a hole."""
    from chaosjob.books import check_order

    drawn = order()[0]
    assert check_order(rows(), [drawn[0::2], drawn[1::2]], LEDGER.to_facts()) == []


def test_check_reward_compares_with_undisturbed_runs():
    """Within the margin of the lowest and the highest; without such runs nothing is said."""
    from chaosjob.books import check_reward

    assert check_reward(0.5, [0.6, 0.7], 0.1) == []
    assert check_reward(0.1, [], 0.1) == []
    assert check_reward(0.4, [0.6, 0.7], 0.1) == [
        "reward: must be within 0.500 and 0.800, as undisturbed runs are, got 0.400"
    ]
    assert check_reward(float("nan"), [0.6], 0.1) != []
