"""Random lives of two tied tables, checked against a naive model, and honest runs that must never stop.

The model knows nothing of queues, heaps or gates: it keeps a list of what was put, what each live lease holds and
what was finished, and recounts the staleness books from scratch.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flight.errors import LeaseLostError
from flight.state.ledger import TakeRequest
from tests.kit.queues import BATCH, GROUP, MAX_ATTEMPTS, fill_rollouts, make_ledger, put_prompts, put_rollouts
from tests.kit.search import num_examples


class TableLives(RuleBasedStateMachine):
    """Any order of puts, partial puts, takes, acks, nacks, expiries, versions and changes of the bound."""

    @initialize(bound=st.integers(0, 3), policy=st.sampled_from(["pace", "drop", "mask", "reweight"]))
    def start(self, bound, policy):
        self.ledger = make_ledger(bound, policy, is_graded=True)
        self.drops = policy in ("pace", "drop")
        self.now = 0.0
        self.bound = bound
        self.num_prompts = 0
        self.leases = {}  # lease id -> (table, consumer, {row_id}, deadline, version)
        self.done = {
            ("prompts", "rollout"): set(),
            ("rollouts", "actor"): set(),
            ("rollouts", "recorder"): set(),
        }
        self.tickets = {}  # prompt uid -> (version, rows that may still come)
        self.starts = {}  # row_id -> policy_version_start
        self.attempts = Counter()
        self.trained = []  # versions that rows were trained for
        self.num_stale = 0  # of these, rows that were older than the bound when they were taken
        self.stale = {}  # lease id -> rows of it that were older than the bound then
        self.rewards = {}  # row_id -> reward
        self.num_uniform = 0

    @property
    def version(self):
        return self.ledger.gates["rollouts"].policy_version

    def rollouts(self):
        return self.ledger.table("rollouts")

    def delivered(self, table, consumer, taken):
        """Note a lease; rows are told apart by row_id, for a retracted uid may come again."""
        ids = {row.row_id for row in taken.lease.rows()}
        held = [
            each for t, c, held, _, _ in self.leases.values() if (t, c) == (table, consumer) for each in held
        ]
        assert not ids & set(held), "delivered twice under live leases"
        assert not ids & self.done[table, consumer], "delivered after it was finished"
        self.attempts.update((table, consumer, row_id) for row_id in ids)
        lease = taken.lease
        self.leases[lease.lease_id] = (table, consumer, ids, lease.deadline, lease.version)
        return [row.uid for row in taken.lease.rows()]

    @rule(count=st.integers(1, 4))
    def put_new_prompts(self, count):
        put_prompts(self.ledger, [f"p{self.num_prompts + index}" for index in range(count)])
        self.num_prompts += count

    @precondition(lambda self: self.num_prompts)
    @rule(data=st.data())
    def put_again(self, data):
        uid = f"p{data.draw(st.integers(0, self.num_prompts - 1))}"
        before = len(self.ledger.table("prompts").rows)
        put_prompts(self.ledger, [uid])
        assert len(self.ledger.table("prompts").rows) == before

    @rule(max_rows=st.integers(1, 4), lag=st.integers(0, 3), lease_s=st.integers(1, 20))
    def take_prompts(self, max_rows, lag, lease_s):
        adopted = max(0, self.version - lag)
        room = (self.bound + 1 - (self.version - adopted)) * BATCH - self.outstanding()
        request = TakeRequest(consumer="rollout", max_rows=max_rows, policy_version=adopted, lease_s=lease_s)
        taken = self.ledger.take("prompts", request, self.now)
        if taken is None or taken.status != "rows":
            assert taken is None or (taken.status == "outdated" and adopted < self.version)
            return
        before = {uid: self.present(uid) for uid in self.delivered("prompts", "rollout", taken)}
        assert sum(max(0, GROUP - there) for there in before.values()) <= room, (
            "more tickets than the bound lets in"
        )
        for uid, there in before.items():
            self.tickets[uid] = (adopted, max(0, GROUP - there))

    def present(self, prompt):
        return sum(row.group_id == prompt for row in self.rollouts().rows.values())

    def outstanding(self):
        """Recount what counts against the bound from the rows themselves."""
        unfinished = sum(
            row.row_id not in self.done["rollouts", "actor"] for row in self.rollouts().rows.values()
        )
        in_flight = sum(left for _, left in self.tickets.values())
        return unfinished + in_flight + sum(version >= self.version for version in self.trained)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), late=st.integers(0, 1), reward=st.sampled_from([0.0, 1.0, None]))
    def put_one_rollout(self, data, late, reward):
        prompt = data.draw(st.sampled_from(sorted(self.tickets)))
        version, left = self.tickets[prompt]
        index = data.draw(st.integers(0, GROUP - 1))
        before = self.members(prompt)
        outcome = put_rollouts(self.ledger, prompt, version + late, [index], [reward])
        if outcome.arrived:
            self.starts[outcome.arrived[0].row_id] = version + late
            self.tickets[prompt] = (version, max(0, left - 1))
            self.note_rewards(before, outcome, [reward])

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), rewards=st.sampled_from([(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (None, None)]))
    def put_group(self, data, rewards):
        prompt = data.draw(st.sampled_from(sorted(self.tickets)))
        version, left = self.tickets[prompt]
        before = self.members(prompt)
        outcome = put_rollouts(self.ledger, prompt, version, rewards=rewards)
        if outcome.arrived:
            arrived = {row.row_id for row in outcome.arrived}
            fresh = [r for r, row_id in zip(rewards, outcome.row_ids, strict=True) if row_id in arrived]
            self.note_rewards(before, outcome, fresh)
        self.starts |= {row.row_id: version for row in outcome.arrived}
        self.tickets[prompt] = (version, max(0, left - len(outcome.arrived)))

    def members(self, prompt):
        """Return the rows of a group that are there."""
        return [row.row_id for row in self.rollouts().rows.values() if row.group_id == prompt]

    def note_rewards(self, before, outcome, rewards):
        """A group that has just become whole with equal rewards must be gone, any other must not."""
        arrived = [row.row_id for row in outcome.arrived]
        self.rewards |= dict(zip(arrived, rewards, strict=True))
        whole = before + arrived
        values = [self.rewards[row_id] for row_id in whole]
        is_uniform = len(whole) == GROUP and values[0] is not None and values[0] == values[1]
        assert all((row_id in self.rollouts().rows) != is_uniform for row_id in whole)
        self.num_uniform += GROUP if is_uniform else 0
        self.drop_gone()

    @rule(max_rows=st.sampled_from([2, 4, 6]), ahead=st.integers(0, 1), lease_s=st.integers(1, 20))
    def take_to_train(self, max_rows, ahead, lease_s):
        version = self.version + ahead
        request = TakeRequest(consumer="actor", max_rows=max_rows, policy_version=version, lease_s=lease_s)
        taken = self.ledger.take("rollouts", request, self.now)
        self.drop_gone()
        if taken is None or taken.status != "rows":
            return
        uids = self.delivered("rollouts", "actor", taken)
        starts = [self.starts[row.row_id] for row in taken.lease.rows()]
        too_old = [
            row for row, start in zip(taken.lease.rows(), starts, strict=True) if version - start > self.bound
        ]
        assert not (self.drops and too_old), "trained too old"
        assert taken.lease.max_staleness == self.bound
        self.stale[taken.lease.lease_id] = {row.row_id for row in too_old}
        groups = Counter(uid.split("/")[0] for uid in uids)
        assert set(groups.values()) == {GROUP}, "a group was torn"

    @rule(lease_s=st.integers(1, 20))
    def take_to_record(self, lease_s):
        request = TakeRequest(consumer="recorder", max_rows=3, lease_s=lease_s)
        taken = self.ledger.take("rollouts", request, self.now)
        if taken is not None and taken.status == "rows":
            self.delivered("rollouts", "recorder", taken)

    @rule(data=st.data())
    def fill(self, data):
        rows = list(self.rollouts().rows.values())
        if rows:
            row = data.draw(st.sampled_from(rows))
            fill_rollouts(self.ledger, [row.uid], [row.group_id])

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), how=st.sampled_from(["ack", "ack", "nack", "skip"]))
    def finish(self, data, how):
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        table, consumer, ids, deadline, version = self.leases.pop(lease_id)
        if deadline <= self.now:
            with pytest.raises(LeaseLostError):
                self.end(how, table, consumer, lease_id)
            return
        self.end(how, table, consumer, lease_id)
        if how == "ack":
            self.num_stale += len(self.stale.get(lease_id, set()) & ids)
        self.after_lease(table, consumer, ids, version, how)

    def end(self, how, table, consumer, lease_id):
        self.ledger.expire(self.now)
        if how == "ack":
            self.ledger.ack(table, consumer, lease_id, None)
        else:
            self.ledger.nack(table, consumer, lease_id, None, reason="test", requeue=how == "nack")

    def after_lease(self, table, consumer, ids, version, how):
        if table == "prompts":
            for row_id in ids:
                self.tickets.pop(f"p{row_id}", None)
        worn_out = {row_id for row_id in ids if self.attempts[table, consumer, row_id] >= MAX_ATTEMPTS}
        self.done[table, consumer] |= ids if how in ("ack", "skip") else worn_out
        if how == "ack" and (table, consumer) == ("rollouts", "actor"):
            self.trained += [version] * len(ids)
        self.drop_gone()

    @rule(seconds=st.integers(1, 30))
    def let_time_pass(self, seconds):
        self.now += seconds
        self.ledger.expire(self.now)
        for lease_id in [lease_id for lease_id, lease in self.leases.items() if lease[3] <= self.now]:
            if lease_id in self.leases:  # it may have shrunk to nothing meanwhile
                table, consumer, ids, _, version = self.leases.pop(lease_id)
                self.after_lease(table, consumer, ids, version, "expired")
        self.drop_gone()

    def drop_gone(self):
        """Leases shrink when their rows are dropped for age or retracted."""
        for lease_id, (table, _, ids, _, _) in list(self.leases.items()):
            if table == "rollouts":
                ids &= set(self.rollouts().rows)
                if not ids:
                    del self.leases[lease_id]

    @rule(step=st.integers(0, 2))
    def announce(self, step):
        self.ledger.announce("rollouts", self.version + step)
        self.drop_gone()

    @rule(bound=st.integers(0, 3))
    def change_bound(self, bound):
        self.ledger.set_max_staleness("rollouts", bound)
        self.bound = bound
        self.drop_gone()

    @invariant()
    def books_agree(self):
        if not hasattr(self, "ledger"):
            return
        gate = self.ledger.gates["rollouts"]
        assert gate.outstanding == self.outstanding()
        ended = gate.counts["used"] + gate.counts["returned"]
        assert gate.counts["issued"] == ended + gate.in_flight.total(), "a ticket is lost"
        assert gate.counts["uniform"] == self.num_uniform
        assert gate.counts["stale"] == self.num_stale == gate.stale_age.total()
        assert not (self.drops and self.num_stale)
        assert self.drops or gate.counts["dropped"] == 0
        assert gate.in_flight.total() == sum(left for _, left in self.tickets.values())
        for table in self.ledger.tables.values():
            for cursor in table.cursors.values():
                waiting = sum(bool(row.pending & cursor.bit) for row in table.rows.values())
                counted = cursor.unready.total() + cursor.num_ready() + cursor.num_leased()
                assert counted == waiting, "a row is lost or counted twice"
                assert all(
                    count > 0
                    for counts in (cursor.unready, cursor.ready, cursor.leased)
                    for count in counts.values()
                )
            assert table.num_reserved <= table.spec.capacity_rows
            assert table.counts["put"] == len(table.rows) + table.counts["retired"]


TestTableLives = TableLives.TestCase
TestTableLives.settings = settings(
    max_examples=num_examples(60),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_ledger_paces_honest_workers_without_loss(bound, seed):
    """Stragglers, lagging workers and dying workers: every group is trained in time, none is dropped, nothing stops."""
    run = HonestRun(bound, random.Random(seed), num_prompts=60)
    run.finish()
    assert run.trained_uids == {f"p{index}/{each}" for index in range(60) for each in range(GROUP)}
    assert max(run.ages) <= bound
    assert run.ledger.gates["rollouts"].counts["dropped"] == 0
    assert not run.ledger.tables["prompts"].rows
    assert not run.ledger.tables["rollouts"].rows


class HonestRun:
    """Workers that generate for a random time, sometimes die, and adopt versions late; a trainer; a recorder."""

    def __init__(self, bound: int, chance: random.Random, num_prompts: int) -> None:
        self.chance = chance
        self.ledger = make_ledger(bound, max_attempts=100)
        put_prompts(self.ledger, [f"p{index}" for index in range(num_prompts)])
        self.ledger.table("prompts").seal()
        self.ledger.table("rollouts").seal(num_prompts * GROUP)
        self.workers = [{"version": 0, "held": []} for _ in range(4)]
        self.trained_uids: set[str] = set()
        self.ages: list[int] = []
        self.now = 0.0

    def finish(self) -> None:
        for _ in range(5000):
            self.now += 1.0
            self.ledger.expire(self.now)
            self.work(self.chance.choice(self.workers))
            if self.chance.random() < 0.5 and self.train():
                return
        raise RuntimeError("the run stopped making progress")

    def work(self, worker) -> None:
        gate = self.ledger.gates["rollouts"]
        if worker["held"] and self.chance.random() < 0.5:
            lease, uid, version = worker["held"].pop(self.chance.randrange(len(worker["held"])))
            if self.chance.random() < 0.1:
                return  # dies: the lease expires
            if lease.deadline > self.now:
                if self.chance.random() < 0.2:  # dies between two puts
                    put_rollouts(self.ledger, uid, version, [0])
                    return
                put_rollouts(self.ledger, uid, version)
                self.ledger.ack("prompts", "rollout", lease.lease_id, [uid])
            return
        if self.chance.random() < 0.6:
            worker["version"] = gate.policy_version
        request = TakeRequest(consumer="rollout", max_rows=2, policy_version=worker["version"], lease_s=40.0)
        taken = self.ledger.take("prompts", request, self.now)
        if taken is not None and taken.status == "rows":
            worker["held"] += [(taken.lease, row.uid, worker["version"]) for row in taken.lease.rows()]
        elif taken is not None and taken.status == "outdated":
            worker["version"] = taken.policy_version

    def train(self) -> bool:
        version = self.ledger.gates["rollouts"].policy_version
        request = TakeRequest(consumer="actor", max_rows=BATCH, min_rows=BATCH, policy_version=version)
        taken = self.ledger.take("rollouts", request, self.now)
        if taken is None:
            return False
        if taken.status == "sealed":
            return True
        rows = taken.lease.rows()
        self.trained_uids |= {row.uid for row in rows}
        self.ages += [version - row.version for row in rows]
        groups = [row.group_id for row in rows]
        fill_rollouts(self.ledger, [row.uid for row in rows], groups)
        late = self.chance.random() < 0.3
        if late:
            self.ledger.announce("rollouts", version + 1)
        self.ledger.ack("rollouts", "actor", taken.lease.lease_id, None)
        if not late:
            self.ledger.announce("rollouts", version + 1)
        self.ledger.ack("prompts", "actor", None, sorted(set(groups)))
        recorded = self.ledger.take("rollouts", TakeRequest(consumer="recorder", max_rows=64), self.now)
        self.ledger.ack("rollouts", "recorder", recorded.lease.lease_id, None)
        return False
