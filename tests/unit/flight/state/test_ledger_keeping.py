"""Random lives with age, truncation, dead letters, late workers and tables that grow; runs whose prompts are given up.

What a life is, and what the model knows of it, is in `test_ledger_life`.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from flight.schema import Column, ConsumerSpec
from flight.state.ledger import Ledger, TakeRequest
from tests.kit.queues import GROUP, MAX_ATTEMPTS, graded_spec, prompts_spec, put_prompts, put_rollouts
from tests.kit.search import num_examples
from tests.unit.flight.state.test_ledger_life import HonestRun, TableLives

MAX_AGE_S = 40.0
TABLES = ("prompts", "rollouts")
CONSUMERS = (("prompts", "rollout"), ("rollouts", "actor"), ("rollouts", "recorder"))


class TimedLedger(Ledger):
    """Puts at the machine's time."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def put(self, *args, **kwargs):
        return super().put(*args, **kwargs, now=self.clock())


class TableKeeps(TableLives):
    """The model of what must be gone, what must be there, and what must not be waited for."""

    @initialize(bound=st.integers(0, 3), policy=st.sampled_from(["pace", "drop", "mask", "reweight"]))
    def start(self, bound, policy):
        TableLives.start(self, bound, policy)
        self.ledger = TimedLedger(lambda: self.now)
        limits = {"max_attempts": MAX_ATTEMPTS, "max_age_s": MAX_AGE_S}
        self.ledger.create(prompts_spec(**limits))
        self.ledger.create(graded_spec(bound, policy, **limits))
        self.first_prompt = 0
        self.dead = {which: set() for which in CONSUMERS}
        self.num_late = 0

    @precondition(lambda self: self.num_prompts > self.first_prompt)
    @rule(data=st.data())
    def put_again(self, data):
        uid = f"p{data.draw(st.integers(self.first_prompt, self.num_prompts - 1))}"
        before = len(self.ledger.table("prompts").rows)
        put_prompts(self.ledger, [uid])
        assert len(self.ledger.table("prompts").rows) == before

    @precondition(lambda self: self.num_prompts > self.first_prompt)
    @rule(data=st.data(), indices=st.sampled_from([[0], [1], [0, 1]]))
    def put_late(self, data, indices):
        """A worker whose lease has expired, or that never had one."""
        prompt = f"p{data.draw(st.integers(self.first_prompt, self.num_prompts - 1))}"
        if prompt in self.tickets:
            return
        outcome = put_rollouts(self.ledger, prompt, self.version, indices, [None] * len(indices))
        for row in outcome.arrived:
            self.starts[row.row_id] = self.version
            self.rewards[row.row_id] = None

    @rule(table=st.sampled_from(TABLES))
    def truncate(self, table):
        ledger = self.ledger
        num_rows = len(ledger.table(table).rows)
        assert ledger.truncate(table) == num_rows
        assert not ledger.table(table).rows
        if table == "prompts":
            self.tickets.clear()
            self.first_prompt = self.num_prompts
        self.drop_gone()
        live = [lease for cursor in ledger.table(table).cursors.values() for lease in cursor.leases]
        assert not live

    @rule(which=st.sampled_from(CONSUMERS))
    def requeue(self, which):
        table, consumer = which
        there = self.dead[which] & set(self.ledger.table(table).rows)
        assert self.ledger.requeue(table, consumer, None) == len(there)
        self.dead[which].clear()
        self.done[which] -= there
        for row_id in there:
            self.attempts[table, consumer, row_id] = 0

    @precondition(lambda self: self.num_late < 2)
    @rule(with_column=st.booleans())
    def alter(self, with_column):
        self.num_late += 1
        name = f"late{self.num_late}"
        column = Column(
            name=name, type=self.rollouts().spec.columns[0].type, meaning="", nullable=True, writer=name
        )
        consumer = ConsumerSpec(name=name, columns=("completion_token_ids",))
        there = len(self.rollouts().rows)
        assert self.ledger.alter("rollouts", [column] if with_column else [], [consumer])
        cursor = self.rollouts().cursor(name)
        assert cursor.num_ready() == there
        self.done["rollouts", name] = set()

    @precondition(lambda self: self.num_late)
    @rule(lease_s=st.integers(1, 20))
    def take_late(self, lease_s):
        name = f"late{self.num_late}"
        taken = self.ledger.take(
            "rollouts", TakeRequest(consumer=name, max_rows=3, lease_s=lease_s), self.now
        )
        if taken is not None and taken.status == "rows":
            self.delivered("rollouts", name, taken)

    @rule(seconds=st.integers(1, 30))
    def let_time_pass(self, seconds):
        TableLives.let_time_pass(self, seconds)
        for table in self.ledger.tables.values():
            held = {
                row.group_id
                for c in table.cursors.values()
                for each in c.leases.values()
                for row in each.rows()
            }
            for row in table.rows.values():
                assert row.put_at + MAX_AGE_S > self.now or row.group_id in held, "too old and still there"

    def after_lease(self, table, consumer, ids, version, how):
        if how not in ("ack", "skip") and (table, consumer) in self.dead:
            self.dead[table, consumer] |= {
                row_id for row_id in ids if self.attempts[table, consumer, row_id] >= MAX_ATTEMPTS
            }
        TableLives.after_lease(self, table, consumer, ids, version, how)

    def drop_gone(self):
        for lease_id, (table, _, ids, _, _) in list(self.leases.items()):
            gone = ids - set(self.ledger.table(table).rows)
            ids -= gone
            if table == "prompts":
                for row_id in gone:
                    self.tickets.pop(f"p{row_id}", None)
            if not ids:
                del self.leases[lease_id]

    @invariant()
    def nothing_is_kept_for_nobody(self):
        if not hasattr(self, "first_prompt"):
            return
        rollouts = self.rollouts()
        for index in range(self.num_prompts):
            if f"p{index}" not in self.tickets:
                assert not rollouts.groups.incomplete(f"p{index}"), "half a group without a ticket"
        for table in self.ledger.tables.values():
            assert all(row.pending or row.dead for row in table.rows.values())
            buried = {
                row.row_id for row in table.rows.values() if row.dead and not row.pending & ~table._keyed
            }
            assert set(table.buried) == buried
            assert table.dead.num_rows == sum(row.dead.bit_count() for row in table.rows.values())


TestTableKeeps = TableKeeps.TestCase
TestTableKeeps.settings = settings(
    max_examples=num_examples(150),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class CarelessRun(HonestRun):
    """Workers that also skip prompts, ack them half done, or let them die."""

    def __init__(self, bound, chance, num_prompts):
        super().__init__(bound, chance, num_prompts)
        self.ledger.drop("prompts")
        self.ledger.create(prompts_spec(max_attempts=2))
        put_prompts(self.ledger, [f"p{index}" for index in range(num_prompts)])
        self.ledger.table("prompts").seal()
        self.num_requeued = 0

    def work(self, worker):
        if worker["held"] and self.chance.random() < 0.2:
            lease, uid, version = worker["held"].pop()
            if lease.deadline > self.now:
                how = self.chance.choice(["skip", "nack", "short", "none"])
                if how in ("short", "none"):
                    put_rollouts(self.ledger, uid, version, [0] if how == "short" else [])
                    self.ledger.ack("prompts", "rollout", lease.lease_id, [uid])
                else:
                    self.ledger.nack(
                        "prompts", "rollout", lease.lease_id, [uid], reason="test", requeue=how == "nack"
                    )
            elif self.chance.random() < 0.5:  # too late, and only half
                put_rollouts(self.ledger, uid, version, [0])
            return
        if (
            self.chance.random() < 0.01
            and self.num_requeued < 5
            and not self.ledger.table("rollouts").is_closed
        ):
            self.num_requeued += self.ledger.requeue("prompts", "rollout", None)
        super().work(worker)


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("seed", range(8))
def test_run_ends_although_prompts_are_given_up(bound, seed):
    """The trainer learns the end as an event: it has all groups that came, and waits for none that will not."""
    run = CarelessRun(bound, random.Random(seed), num_prompts=60)
    run.finish()
    rollouts = run.ledger.tables["rollouts"]
    assert rollouts.end.num_never > 0
    assert rollouts.num_put + rollouts.end.num_never == 60 * GROUP
    assert len(run.trained_uids) == rollouts.num_put - rollouts.counts["abandoned"]
    assert rollouts.num_reserved == 0
