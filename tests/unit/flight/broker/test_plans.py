"""Plans: one step, one split, whoever asks and however often, until it is acked, nacked or lost."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flight.broker import Broker, Wait
from flight.broker.plans import FetchRequest
from flight.errors import InvalidRequestError, LeaseLostError
from flight.state.ledger import TakeRequest
from flight.state.plan import SplitRules
from flight.state.plan_book import PLANS_KEPT, PlanOrder
from tests.kit.clock import FakeClock
from tests.kit.queues import rollouts_spec
from tests.kit.search import num_examples

NOW = Wait(deadline=0.0)
TOKENS = ("completion_token_ids",)


def open_broker(num_groups: int = 0, **changes) -> Broker:
    """Return a broker with rollouts; group n has answers of n + 1 and 2 n + 1 tokens."""
    broker = Broker(clock=FakeClock())
    broker.create_table(rollouts_spec(3, "drop", **changes), exist_ok=False)
    for number in range(num_groups):
        put_group(broker, number)
    return broker


def put_group(broker: Broker, number: int, version: int = 0) -> None:
    """Put a group of two rows."""
    lengths = [number + 1, 2 * number + 1]
    data = {
        "uid": [f"g{number}/0", f"g{number}/1"],
        "group_id": [f"g{number}"] * 2,
        "policy_version_start": pa.array([version] * 2, pa.int64()),
        "completion_token_ids": pa.array([[9] * length for length in lengths], pa.list_(pa.int32())),
    }
    broker.put("rollouts", pa.record_batch(data), "", NOW)


def order(step: int = 0, *, num_ranks: int = 2, max_rows: int = 8, **changes) -> PlanOrder:
    """Return what a rank asks for."""
    rules = {name: changes.pop(name) for name in list(changes) if name in SplitRules.__annotations__}
    values = {
        "consumer": "actor",
        "step": step,
        "max_rows": max_rows,
        "min_rows": max_rows,
        "policy_version": None,
        "balance": TOKENS,
        "rules": SplitRules(num_ranks=num_ranks, **rules),
    }
    return PlanOrder(**values | changes)


def plan(broker: Broker, asked: PlanOrder, wait: Wait = NOW, lease_s: float = 10.0):
    """Ask for a plan."""
    return broker.plan("rollouts", asked, lease_s=lease_s, member="rank", wait=wait)


def fetch(broker: Broker, plan_id: str, rank: int, **changes) -> pa.Table:
    """Ask for a rank's part."""
    return broker.fetch("rollouts", FetchRequest(plan_id=plan_id, rank=rank, **changes))


def rows_of(answer) -> list[list[list[int]]]:
    """Return row ids by rank and micro-batch."""
    return [[[answer.plan.rows[i].row_id for i in each] for each in rank] for rank in answer.plan.split]


def flat(rows: list[list[list[int]]]) -> list[int]:
    """Return the row ids of all ranks and micro-batches."""
    return [row_id for rank in rows for micro_batch in rank for row_id in micro_batch]


def test_every_rank_gets_the_same_plan_and_its_part_of_it():
    """Two ranks ask for step 0: one plan; their parts are all rows once, balanced, within the budget."""
    broker = open_broker(4)
    asked = order(max_tokens_per_micro_batch=8)
    first, second = plan(broker, asked), plan(broker, asked)
    assert first.status == second.status == "rows"
    assert first.plan.plan_id == second.plan.plan_id
    assert rows_of(first) == rows_of(second)
    parts = [fetch(broker, first.plan.plan_id, rank) for rank in (0, 1)]
    assert sorted(uid for part in parts for uid in part["uid"].to_pylist()) == [
        f"g{group}/{index}" for group in range(4) for index in range(2)
    ]
    for rank, part in enumerate(parts):
        assert part.schema.names[:6] == ["row_id", "uid", "group_id", "attempt", "micro_batch", "staleness"]
        lengths = [len(tokens) for tokens in part["completion_token_ids"].to_pylist()]
        by_micro_batch = {}
        for number, length in zip(part["micro_batch"].to_pylist(), lengths, strict=True):
            by_micro_batch[number] = by_micro_batch.get(number, 0) + length
        assert max(by_micro_batch.values()) <= 8
        assert sum(lengths) == sum(first.plan.sizes[i] for each in first.plan.split[rank] for i in each)
    assert broker.stats("rollouts")["rollouts"]["consumers"]["actor"]["leased"] == 8


def test_rank_that_crashed_fetches_the_same_rows_again():
    """Whatever came in between, a live plan answers alike; only the columns asked for move."""
    broker = open_broker(4)
    made = plan(broker, order())
    before = fetch(broker, made.plan.plan_id, 1, columns=["media"])
    put_group(broker, 9)
    broker.announce("rollouts", 2)
    other = broker.take("rollouts", TakeRequest(consumer="actor", max_rows=2), None, NOW)
    assert other.status == "rows"
    again = plan(broker, order())
    assert again.plan.plan_id == made.plan.plan_id
    after = fetch(broker, again.plan.plan_id, 1, columns=["media"])
    assert after.equals(before)
    assert "completion_token_ids" not in after.schema.names


def test_micro_batches_are_fetched_one_by_one():
    """The parts are the whole; one that a rank has no row for is empty."""
    broker = open_broker(4)
    made = plan(broker, order(max_tokens_per_micro_batch=7, num_ranks=3))
    for rank in range(3):
        whole = fetch(broker, made.plan.plan_id, rank)
        parts = [
            fetch(broker, made.plan.plan_id, rank, micro_batch=number)
            for number in range(made.plan.num_micro_batches)
        ]
        assert pa.concat_tables(parts).to_pydict() == whole.to_pydict()
    wide = plan(open_broker(1), order(max_rows=2, num_ranks=5))
    assert [sum(map(len, rank)) for rank in wide.plan.split] == [1, 1, 0, 0, 0]


def test_groups_stay_on_one_rank_if_asked():
    """With keep_groups a rank has both rows of a group or none."""
    broker = open_broker(4)
    made = plan(broker, order(keep_groups=True))
    for rank in (0, 1):
        groups = fetch(broker, made.plan.plan_id, rank, columns=[])["group_id"].to_pylist()
        assert all(groups.count(group) == 2 for group in groups)


def test_acked_step_is_finished_and_the_next_gets_other_rows():
    """A rank that asks again after the ack is told so instead of training the step twice."""
    broker = open_broker(8)
    made = plan(broker, order(0))
    assert broker.ack("rollouts", "actor", made.plan.plan_id, None, step=0) == 8
    again = plan(broker, order(0))
    assert (again.status, again.plan.plan_id, rows_of(again)) == ("finished", made.plan.plan_id, [])
    following = plan(broker, order(1))
    assert not set(flat(rows_of(following))) & set(flat(rows_of(made)))
    with pytest.raises(LeaseLostError) as caught:
        fetch(broker, made.plan.plan_id, 0)
    assert str(caught.value) == (
        f"plan: plan_id must be a live plan, got {made.plan.plan_id!r}, which is unknown or has ended; "
        "ask for the plan of the step again"
    )


@pytest.mark.parametrize("how", ["nack", "expiry", "skip"])
def test_lost_plan_is_made_anew(how):
    """After a nack or an expiry the step is planned again, under another id; what was skipped is not in it."""
    broker = open_broker(6)
    made = plan(broker, order(0))
    if how == "expiry":
        broker.clock.advance(10.0)
    else:
        broker.nack("rollouts", "actor", made.plan.plan_id, None, reason="test", requeue=how == "nack")
    with pytest.raises(LeaseLostError):
        fetch(broker, made.plan.plan_id, 0)
    again = plan(broker, order(0, min_rows=2))
    assert again.status == "rows"
    assert again.plan.plan_id != made.plan.plan_id
    expected = set(range(8)) if how != "skip" else set(range(8, 12))
    assert set(flat(rows_of(again))) == expected


def test_renewed_plan_lives_on():
    """renew takes the plan's id: a plan is a lease."""
    broker = open_broker(4)
    made = plan(broker, order(0))
    broker.clock.advance(9.0)
    broker.renew("rollouts", "actor", made.plan.plan_id, 10.0)
    broker.clock.advance(9.0)
    assert plan(broker, order(0)).plan.plan_id == made.plan.plan_id


def test_rank_may_ack_its_own_rows():
    """The plan is finished with the last ack; till then other ranks fetch, and what is gone is refused."""
    broker = open_broker(4, consumers=rollouts_spec().consumers[:1])
    made = plan(broker, order(0, keep_groups=True))
    uids = [fetch(broker, made.plan.plan_id, rank)["uid"].to_pylist() for rank in (0, 1)]
    broker.ack("rollouts", "actor", made.plan.plan_id, uids[0])
    assert fetch(broker, made.plan.plan_id, 1)["uid"].to_pylist() == uids[1]
    with pytest.raises(
        LeaseLostError, match="all rows of rank 0 must be in the table, got 4 that are finished"
    ):
        fetch(broker, made.plan.plan_id, 0)
    broker.ack("rollouts", "actor", made.plan.plan_id, uids[1])
    assert plan(broker, order(0, keep_groups=True)).status == "finished"


def test_ranks_that_wait_for_the_same_step_get_one_plan():
    """Both ask before the rows are there; the group that completes the batch wakes both, one batch is leased."""
    broker = Broker()
    broker.create_table(rollouts_spec(3, "drop"), exist_ok=False)
    answers = []

    def ask() -> None:
        answers.append(plan(broker, order(0), Wait(deadline=broker.clock() + 20.0)))

    ranks = [threading.Thread(target=ask) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for number in range(8):
        put_group(broker, number)
    for rank in ranks:
        rank.join(20.0)
    assert {answer.status for answer in answers} == {"rows"}
    assert len({answer.plan.plan_id for answer in answers}) == 1
    assert broker.stats("rollouts")["rollouts"]["consumers"]["actor"]["leased"] == 8


def test_plan_without_rows_says_why():
    """Too few rows: empty; the end: what is left, then sealed."""
    broker = open_broker(1)
    assert plan(broker, order(0)).status == "empty"
    broker.seal("rollouts", None)
    made = plan(broker, order(0))
    assert len(made.plan.rows) == 2
    broker.ack("rollouts", "actor", made.plan.plan_id, None)
    assert plan(broker, order(1)).status == "sealed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_ranks": 0}, "num_ranks must be at least 1, got 0"),
        ({"num_ranks": 10**9}, "num_ranks must be at most 16384, got 1000000000"),
        ({"step": -1}, "step must be at least 0, got -1"),
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch must be at least 1, got 0"),
        (
            {"max_tokens_per_micro_batch": 9, "balance": ()},
            "balance must name the columns that hold the tokens",
        ),
        ({"balance": ("nowhere",)}, "columns must be among"),
        ({"balance": ("advantage",)}, "which another writer puts later"),
        ({"balance": ("score",)}, "got 'score' of type float"),
        ({"max_rows": 3, "min_rows": 3}, "max_rows must hold min_rows in whole units of 2"),
    ],
)
def test_plan_that_cannot_be_made_is_refused(changes, message):
    """Before any row is leased."""
    plain = rollouts_spec()
    score = type(plain.columns[0])(
        name="score", type=pa.float32(), meaning="x", writer="rollout", nullable=True
    )
    broker = open_broker(4, columns=(*plain.columns, score))
    with pytest.raises(InvalidRequestError) as caught:
        plan(broker, order(**changes))
    assert message in str(caught.value)
    assert broker.stats("rollouts")["rollouts"]["consumers"]["actor"]["leased"] == 0


def test_ranks_that_disagree_are_told_so():
    """The same step with another number of ranks is a wiring mistake, not a second plan."""
    broker = open_broker(8)
    plan(broker, order(0))
    with pytest.raises(InvalidRequestError) as caught:
        plan(broker, order(0, num_ranks=3))
    assert str(caught.value) == (
        "plan of step 0 by actor: it must be asked for as by the first rank, got other values of ['rules']; "
        "all ranks of a step must agree"
    )
    made = plan(broker, order(0))
    with pytest.raises(InvalidRequestError, match="rank must be from 0 to 1, got 2"):
        fetch(broker, made.plan.plan_id, 2)
    with pytest.raises(InvalidRequestError, match="micro_batch must be from 0 to 0, got 1"):
        fetch(broker, made.plan.plan_id, 0, micro_batch=1)


def test_plan_marks_the_age_of_its_rows_as_of_its_making():
    """A later version or another K does not change what a rank that asks again is told."""
    broker = Broker(clock=FakeClock())
    broker.create_table(rollouts_spec(0, "mask"), exist_ok=False)
    put_group(broker, 1, version=0)
    broker.announce("rollouts", 1)
    made = plan(broker, order(0, max_rows=2, num_ranks=1))
    before = fetch(broker, made.plan.plan_id, 0)
    assert before["staleness"].to_pylist() == [1, 1]
    assert before["stale_tokens"].to_pylist() == [[True, True], [True, True, True]]
    broker.announce("rollouts", 2)
    broker.set_max_staleness("rollouts", 5)
    assert fetch(broker, made.plan.plan_id, 0).equals(before)


def test_plans_do_not_pile_up():
    """Ended plans are forgotten after a while; live ones never."""
    broker = open_broker(consumers=rollouts_spec().consumers[:1])
    put_group(broker, 0)
    first = plan(broker, order(0, max_rows=2), lease_s=1e6)
    for step in range(1, PLANS_KEPT + 50):
        put_group(broker, step % 7 + 100 * step)
        made = plan(broker, order(step, max_rows=2))
        broker.ack("rollouts", "actor", made.plan.plan_id, None)
    book = broker._ledger.table("rollouts").plans
    assert len(book._by_step["actor"]) <= PLANS_KEPT + 1
    assert plan(broker, order(0, max_rows=2)).plan.plan_id == first.plan.plan_id


class PlanLives(RuleBasedStateMachine):
    """Any order of groups, plans, fetches, acks, nacks, expiries, versions and changes of K, against a naive model."""

    @initialize(policy=st.sampled_from(["pace", "drop", "mask"]))
    def start(self, policy):
        self.broker = Broker(clock=FakeClock())
        self.broker.create_table(rollouts_spec(2, policy), exist_ok=False)
        self.drops = policy != "mask"
        self.bound, self.version, self.num_groups = 2, 0, 0
        self.live, self.ids, self.finished = (
            {},
            {},
            {},
        )  # step -> (id, rows, deadline), id ever given, id acked
        self.trained = []

    @rule()
    def put(self):
        if self.num_groups - len(self.trained) // 2 < 20:
            put_group(self.broker, self.num_groups, self.version)
            self.num_groups += 1

    @rule(step=st.integers(0, 5), ranks=st.integers(1, 3))
    def ask(self, step, ranks):
        ranks = self.live[step][3] if step in self.live else self.finished.get(step, (None, ranks))[1]
        asked = order(step, num_ranks=ranks, max_rows=4, keep_groups=True)
        answer = plan(self.broker, asked)
        if step in self.finished:
            assert (answer.status, answer.plan.plan_id) == ("finished", self.finished[step][0])
            return
        if answer.status != "rows":
            assert step not in self.live
            return
        rows = rows_of(answer)
        everything = flat(rows)
        if step in self.live:
            assert self.live[step][:2] == (answer.plan.plan_id, rows), "another split for the same step"
            return
        assert answer.plan.plan_id not in self.ids
        self.ids[answer.plan.plan_id] = step
        held = {row for _, other, _, _ in self.live.values() for row in flat(other)}
        assert not held & set(everything), "planned twice"
        assert not set(everything) & set(self.trained), "planned after it was trained"
        assert sorted(everything) == sorted(set(everything))
        ages = [answer.plan.lease.version - row.version for row in answer.plan.rows]
        assert not self.drops or max(ages) <= self.bound, "trained too old"
        self.live[step] = (answer.plan.plan_id, rows, self.broker.clock() + 10.0, ranks)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def replay(self, data):
        plan_id, rows, _, ranks = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        rank = data.draw(st.integers(0, ranks - 1))
        assert fetch(self.broker, plan_id, rank, columns=[])["row_id"].to_pylist() == flat(
            rows[rank : rank + 1]
        )

    @precondition(lambda self: self.live)
    @rule(data=st.data(), how=st.sampled_from(["ack", "nack"]))
    def finish(self, data, how):
        step = data.draw(st.sampled_from(sorted(self.live)))
        plan_id, rows, _, ranks = self.live.pop(step)
        if how == "ack":
            self.broker.ack("rollouts", "actor", plan_id, None)
            self.trained += flat(rows)
            self.finished[step] = (plan_id, ranks)
        else:
            self.broker.nack("rollouts", "actor", plan_id, None, reason="test", requeue=True)
        with pytest.raises(LeaseLostError):
            fetch(self.broker, plan_id, 0)

    @rule(seconds=st.integers(1, 8))
    def let_time_pass(self, seconds):
        self.broker.clock.advance(seconds)
        now = self.broker.clock()
        self.live = {step: each for step, each in self.live.items() if each[2] > now}

    @rule()
    def announce(self):
        self.version += 1
        self.broker.announce("rollouts", self.version)

    @rule(bound=st.integers(0, 3))
    def change_bound(self, bound):
        self.bound = bound
        self.broker.set_max_staleness("rollouts", bound)

    @invariant()
    def books_agree(self):
        if not hasattr(self, "broker"):
            return
        actor = self.broker.stats("rollouts")["rollouts"]["consumers"]["actor"]
        assert actor["leased"] == sum(len(flat(rows)) for _, rows, _, _ in self.live.values())
        assert actor["acked"] == len(self.trained)


TestPlanLives = PlanLives.TestCase
TestPlanLives.settings = settings(
    max_examples=num_examples(40),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
