"""Random lives of tied tables with a journal, crashes and rewinds in them: what comes back is what was there."""

from __future__ import annotations

import copy
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from flight.broker import Wait
from flight.broker.plans import Plan
from flight.errors import FlightQueueError
from flight.schema import Column, ConsumerSpec
from flight.state.ledger import TakeRequest
from flight.state.plan import SplitRules
from flight.state.plan_book import PlanOrder
from tests.kit.clock import FakeClock
from tests.kit.journals import crashed, open_journal, rebuilt, state_of
from tests.kit.queues import BATCH, GROUP, graded_spec, prompts_spec
from tests.kit.search import num_examples

UIDS = [f"p{index}" for index in range(12)]


def rollouts(group: str, indices: list[int], version: int, reward: float | None) -> pa.RecordBatch:
    """Return the rollout's part of rows."""
    size = len(indices)
    return pa.record_batch(
        {
            "uid": [f"{group}/{index}" for index in indices],
            "group_id": [group] * size,
            "policy_version_start": pa.array([version] * size, pa.int64()),
            "completion_token_ids": pa.array([[1] * (index + 1) for index in indices], pa.list_(pa.int32())),
            "reward": pa.array([reward] * size, pa.float32()),
        }
    )


class JournaledLives(RuleBasedStateMachine):
    """Any order of verbs, checkpoints and crashes. After a crash nothing differs but that leases are void."""

    @initialize(
        bound=st.integers(0, 2),
        policy=st.sampled_from(["pace", "drop", "mask", "reweight"]),
        age=st.sampled_from([None, 40.0]),
    )
    def start(self, bound, policy, age):
        self.root = Path(tempfile.mkdtemp(prefix="journal-test-"))
        self.path = self.root / "0"
        self.clock = FakeClock()
        self.num_crashes = 0
        self.leases = []
        self.kept = {}
        self.broker = self.open()
        self.broker.create_table(prompts_spec(fsync="batch", max_dead_letters=3), exist_ok=False)
        spec = graded_spec(bound, policy, fsync="batch", max_age_s=age, max_dead_letters=3)
        self.broker.create_table(spec, exist_ok=False)

    def open(self):
        return open_journal(self.path, self.clock, segment_bytes=16384)

    def teardown(self):
        if hasattr(self, "broker"):
            self.broker.close()
            shutil.rmtree(self.root)

    @property
    def wait(self):
        return Wait(deadline=self.clock())

    def attempt(self, verb, *arguments, **options):
        """Do something that may be refused in this state; a refusal changes nothing."""
        try:
            return verb(*arguments, **options)
        except FlightQueueError:
            return None

    @rule(uids=st.lists(st.sampled_from(UIDS), min_size=1, max_size=3, unique=True))
    def put_prompts(self, uids):
        self.attempt(self.broker.put, "prompts", pa.record_batch({"uid": uids, "text": uids}), "", self.wait)

    @rule(
        group=st.sampled_from(UIDS),
        indices=st.sampled_from([[0], [1], [0, 1], [1, 0]]),
        version=st.integers(0, 3),
        reward=st.sampled_from([None, 0.0, 1.0]),
    )
    def put_rollouts(self, group, indices, version, reward):
        batch = rollouts(group, indices, version, reward)
        self.attempt(self.broker.put, "rollouts", batch, "rollout", self.wait)

    @rule(group=st.sampled_from(UIDS), index=st.integers(0, GROUP - 1))
    def put_advantage(self, group, index):
        batch = pa.record_batch(
            {
                "uid": [f"{group}/{index}"],
                "group_id": [group],
                "advantage": pa.array([0.5], pa.float32()),
            }
        )
        self.attempt(self.broker.put, "rollouts", batch, "actor", self.wait)

    @rule(
        who=st.sampled_from([("prompts", "rollout"), ("rollouts", "actor"), ("rollouts", "recorder")]),
        max_rows=st.sampled_from([2, 4]),
        version=st.sampled_from([None, 0, 1, 2]),
        lease_s=st.integers(1, 20),
    )
    def take(self, who, max_rows, version, lease_s):
        request = TakeRequest(consumer=who[1], max_rows=max_rows, policy_version=version, lease_s=lease_s)
        answer = self.attempt(self.broker.take, who[0], request, None, self.wait)
        if answer is not None and answer.lease_id:
            self.leases.append((*who, answer.lease_id, answer.table.column("uid").to_pylist()))

    @rule(step=st.integers(0, 3))
    def plan(self, step):
        order = PlanOrder(
            consumer="actor",
            step=step,
            max_rows=BATCH,
            min_rows=GROUP,
            policy_version=None,
            balance=("completion_token_ids",),
            rules=SplitRules(num_ranks=2),
        )
        answer = self.attempt(self.broker.plan, "rollouts", order, lease_s=10.0, member="m", wait=self.wait)
        if answer is not None and isinstance(answer.plan, Plan) and answer.status == "rows":
            self.leases.append(("rollouts", "actor", answer.plan.plan_id, None))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), how=st.sampled_from(["ack", "ack", "some", "nack", "skip", "renew"]))
    def finish(self, data, how):
        table, consumer, lease_id, uids = data.draw(st.sampled_from(self.leases))
        if how in ("ack", "some"):
            some = uids[:GROUP] if how == "some" and uids else None
            self.attempt(self.broker.ack, table, consumer, lease_id, some, 7)
        elif how == "renew":
            self.attempt(self.broker.renew, table, consumer, lease_id, 30.0)
        else:
            self.attempt(
                self.broker.nack, table, consumer, lease_id, None, reason="test", requeue=how == "nack"
            )

    @rule(uids=st.lists(st.sampled_from(UIDS), max_size=3))
    def ack_keyed(self, uids):
        self.attempt(self.broker.ack, "prompts", "actor", None, uids)

    @rule(who=st.sampled_from([("prompts", "rollout"), ("rollouts", "actor")]), whole=st.booleans())
    def requeue(self, who, whole):
        self.broker.requeue(*who, None if whole else ["p1", "p1/0"])

    @rule(seconds=st.integers(1, 30))
    def let_time_pass(self, seconds):
        self.clock.advance(seconds)
        self.broker.stats()

    @rule(version=st.integers(0, 3))
    def announce(self, version):
        self.attempt(self.broker.announce, "rollouts", version)

    @rule(bound=st.integers(0, 3))
    def change_bound(self, bound):
        self.broker.set_max_staleness("rollouts", bound)

    @rule(what=st.sampled_from(["seal", "alter", "truncate", "drop", "copy"]))
    def change_table(self, what):
        if what == "seal":
            self.attempt(self.broker.seal, "rollouts", 40)
        elif what == "alter":
            column = Column(name="note", type=pa.string(), meaning="n", writer="judge", nullable=True)
            self.broker.alter_table(
                "rollouts", [column], [ConsumerSpec(name="judge", columns=("advantage",))]
            )
        elif what == "truncate":
            self.broker.truncate_table("rollouts")
        else:
            spec = replace(prompts_spec(), name="copy", tickets=None)
            self.attempt(self.broker.drop_table, "copy")
            self.broker.create_table(spec, exist_ok=False)
            self.broker.put("copy", pa.record_batch({"uid": ["a"], "text": [what]}), "", self.wait)

    @rule(sparse=st.sampled_from([0.5, 1.0]))
    def make_checkpoint(self, sparse):
        self.broker.checkpoint(sparse=sparse)

    def expected(self):
        """Return what is there if all leases end."""
        expected, values = state_of(rebuilt(self.broker)), state_of(self.broker)
        for name, table in expected.items():
            live = {row["row_id"] for row in table.pop("values")}
            table["values"] = [row for row in values[name]["values"] if row["row_id"] in live]
        return expected

    @rule(name=st.sampled_from(["one", "two"]))
    def prepare(self, name):
        """Keep a checkpoint, unless a committed one has the name."""
        self.broker.stats()  # Whose time is over is gone before.
        expected = self.expected()
        if self.attempt(self.broker.prepare, name) is not None:
            self.kept[name] = expected

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), what=st.sampled_from(["commit", "release"]))
    def finish_checkpoint(self, data, what):
        name = data.draw(st.sampled_from(sorted(self.kept)))
        if what == "commit":
            self.broker.commit(name)
        else:
            self.broker.release(name)
            del self.kept[name]

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def rewind(self, data):
        """All tables are what they were, in every detail; only numbers of rows go on."""
        name = data.draw(st.sampled_from(sorted(self.kept)))
        next_row_ids = {name: table.next_row_id for name, table in self.broker.ledger.tables.items()}
        self.broker.rewind(name)
        found, expected = state_of(self.broker), copy.deepcopy(self.kept[name])
        assert found.keys() == expected.keys()
        for table, each in found.items():
            now, then = each["state"].pop("next_row_id"), expected[table]["state"].pop("next_row_id")
            assert now == max(then, next_row_ids.get(table, 0))
            # What has grown too old since is there at first, and gone when the values are asked for.
            row_ids = {row["row_id"] for row in each["values"]}
            values = [row for row in expected[table].pop("values") if row["row_id"] in row_ids]
            assert each.pop("values") == values
        assert found == expected
        self.leases.clear()
        self.check_books()

    @rule()
    def crash(self):
        """Everything that was written is there again, in every detail."""
        self.broker.flush()
        expected = self.expected()
        self.num_crashes += 1
        self.path = crashed(self.path, self.root / str(self.num_crashes))
        self.broker.close()
        self.broker = self.open()
        assert state_of(self.broker) == expected
        assert sorted(each["checkpoint_id"] for each in self.broker.kept_checkpoints()) == sorted(self.kept)
        assert self.broker.recovered.num_torn == 0
        self.check_books()

    def check_books(self):
        """No ticket is out when no lease is live, and what is outstanding is what is there."""
        gate = self.broker.ledger.gates["rollouts"]
        table = self.broker.ledger.tables["rollouts"]
        cursor = table.cursors["actor"]
        waiting = sum(bool(row.pending & cursor.bit) for row in table.rows.values())
        assert gate.in_flight.total() == 0
        assert gate.num_waiting == waiting
        assert gate.outstanding == waiting + gate.trained.total()
        assert all(cursor.num_leased() == 0 for cursor in table.cursors.values())


TestJournaledLives = JournaledLives.TestCase
TestJournaledLives.settings = settings(
    max_examples=num_examples(25),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
