"""Four policies at the exit, versions that are announced and not adopted, changes of K, groups that teach nothing."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flight.broker import Broker, Wait
from flight.errors import InvalidRequestError, SchemaMismatchError
from flight.schema import Column, ConsumerSpec
from flight.state.evolution import evolve
from flight.state.ledger import Ledger, TakeRequest
from tests.kit.clock import FakeClock
from tests.kit.queues import (
    BATCH,
    GROUP,
    graded_spec,
    make_ledger,
    put_prompts,
    put_rollouts,
    rollouts_spec,
)

POLICIES = ["pace", "drop", "mask", "reweight"]
NOW = Wait(deadline=0.0)


def take_prompts(ledger: Ledger, version: int | None, max_rows: int = 100):
    """Take prompts as a rollout that generates from `version`."""
    return ledger.take(
        "prompts", TakeRequest(consumer="rollout", max_rows=max_rows, policy_version=version), 0.0
    )


def take_batch(ledger: Ledger, version: int | None = None, max_rows: int = BATCH):
    """Take what is there to train on."""
    return ledger.take(
        "rollouts", TakeRequest(consumer="actor", max_rows=max_rows, policy_version=version), 0.0
    )


def with_prompts(max_staleness: int, policy: str, **changes) -> Ledger:
    """Return tied tables with plenty of prompts."""
    ledger = make_ledger(max_staleness, policy, **changes)
    put_prompts(ledger, [f"p{index}" for index in range(40)])
    return ledger


@pytest.mark.parametrize("policy", ["mask", "reweight"])
def test_old_rows_are_delivered_and_counted_by_age(policy):
    """With K = 1, rows of version 0 are still trained at version 3; they are counted as stale, by age."""
    ledger = with_prompts(1, policy)
    taken = take_prompts(ledger, 0)
    for row in taken.lease.rows():
        put_rollouts(ledger, row.uid, 0)
    ledger.ack("prompts", "rollout", taken.lease.lease_id, None)
    ledger.announce("rollouts", 1)
    first = take_batch(ledger)
    ledger.ack("rollouts", "actor", first.lease.lease_id, None)
    ledger.announce("rollouts", 3)
    second = take_batch(ledger)
    assert len(second.lease.rows()) == BATCH
    assert second.lease.max_staleness == 1
    ledger.set_max_staleness("rollouts", 5)
    ledger.ack("rollouts", "actor", second.lease.lease_id, None)
    gate = ledger.gates["rollouts"]
    assert gate.trained_age == {1: 4, 3: 4}
    assert gate.stale_age == {3: 4}
    assert gate.dropped_age == {}
    assert ledger.table("rollouts").measured[-1][0] == "stale"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_announced_version_that_no_rollout_adopts_keeps_the_bound(policy, max_staleness):
    """Rollouts that stay at version 0 start no more than (K + 1) batches; then they are told to adopt.

    Nothing that they made is trained beyond K under "pace" and "drop", nor unmarked under "mask" and "reweight".
    """
    ledger = with_prompts(max_staleness, policy)
    gate = ledger.gates["rollouts"]
    num_issued, trained = 0, []
    for version in range(6):
        ledger.announce("rollouts", version)
        taken = take_prompts(ledger, 0)
        if taken is not None and taken.status == "rows":
            num_issued += len(taken.lease.rows()) * GROUP
            assert gate.outstanding <= (max_staleness + 1 - version) * BATCH
            for row in taken.lease.rows():
                put_rollouts(ledger, row.uid, 0)
            ledger.ack("prompts", "rollout", taken.lease.lease_id, None)
        else:
            assert taken is None or taken.status == "outdated"
        batch = take_batch(ledger)
        if batch is not None:
            trained += [(version - row.version, batch.lease.max_staleness) for row in batch.lease.rows()]
            ledger.ack("rollouts", "actor", batch.lease.lease_id, None)
    assert take_prompts(ledger, 0).status == "outdated"
    assert num_issued == len(trained) == (max_staleness + 1) * BATCH
    assert all(age <= bound for age, bound in trained)
    assert gate.stale_age == gate.dropped_age == {}


@pytest.mark.parametrize("policy", POLICIES)
def test_rollout_that_lies_about_its_version_is_caught_at_the_exit(policy):
    """It claims version 3 and writes rows of version 0: never trained unmarked, whatever the policy."""
    ledger = with_prompts(1, policy)
    ledger.announce("rollouts", 3)
    taken = take_prompts(ledger, 3, 2)
    for row in taken.lease.rows():
        put_rollouts(ledger, row.uid, 0)
    batch = take_batch(ledger)
    gate = ledger.gates["rollouts"]
    if policy in ("pace", "drop"):
        assert batch is None
        assert gate.dropped_age == {3: 4}
        return
    ledger.ack("rollouts", "actor", batch.lease.lease_id, None)
    assert gate.stale_age == {3: 4}


@pytest.mark.parametrize("policy", POLICIES)
def test_bound_changes_under_every_policy(policy):
    """A larger K lets more in at once; a smaller one holds back until it fits, and acts on what is there."""
    ledger = with_prompts(0, policy)
    assert len(take_prompts(ledger, 0).lease.rows()) * GROUP == BATCH
    ledger.set_max_staleness("rollouts", 2)
    more = take_prompts(ledger, 0)
    assert len(more.lease.rows()) * GROUP == 2 * BATCH
    for row in more.lease.rows():
        put_rollouts(ledger, row.uid, 0)
    ledger.announce("rollouts", 1)
    ledger.set_max_staleness("rollouts", 0)
    gate = ledger.gates["rollouts"]
    assert gate.counts["dropped"] == (2 * BATCH if policy in ("pace", "drop") else 0)
    assert take_prompts(ledger, 1) is None
    batch = take_batch(ledger)
    assert (batch is None) == (policy in ("pace", "drop"))


def rollouts(group: str, start: int, tokens: list[list[int] | None], rewards=(1.0, 0.0)) -> pa.RecordBatch:
    """Return a group of two rows with the version of each token."""
    return pa.record_batch(
        {
            "uid": [f"{group}/0", f"{group}/1"],
            "group_id": [group, group],
            "policy_version_start": pa.array([start, start], pa.int64()),
            "completion_token_ids": pa.array(
                [[7] * len(each or []) for each in tokens], pa.list_(pa.int32())
            ),
            "token_policy_versions": pa.array(tokens, pa.list_(pa.int32())),
            "reward": pa.array(rewards, pa.float32()),
        }
    )


@pytest.mark.parametrize("policy", ["mask", "reweight"])
def test_take_marks_stale_tokens_of_partial_rollouts(policy):
    """K = 1 at version 3: tokens of versions 0 and 1 are stale, those of 2 and 3 are not; a null stays null."""
    broker = Broker(clock=FakeClock())
    broker.create_table(graded_spec(1, policy), exist_ok=False)
    broker.put("rollouts", rollouts("a", 3, [[3, 3], [3]]), "", NOW)
    broker.put("rollouts", rollouts("b", 0, [[0, 1, 2, 3], None]), "", NOW)
    broker.put("rollouts", rollouts("c", 1, [[], [1, 2]]), "", NOW)
    broker.announce("rollouts", 3)
    request = TakeRequest(consumer="actor", max_rows=6)
    answer = broker.take("rollouts", request, ["reward"], NOW)
    assert (answer.max_staleness, answer.policy) == (1, policy)
    assert answer.table["uid"].to_pylist() == ["b/0", "b/1", "c/0", "c/1", "a/0", "a/1"]
    assert answer.table["staleness"].to_pylist() == [3, 3, 2, 2, 0, 0]
    assert answer.table["stale_tokens"].to_pylist() == [
        [True, True, False, False],
        None,
        [],
        [True, False],
        [False, False],
        [False],
    ]
    assert answer.table.schema.field("staleness").type == pa.int32()
    broker.ack("rollouts", "actor", answer.lease_id, None)
    stats = broker.stats("rollouts")["rollouts"]["staleness"]
    assert stats["trained_age"] == {"0": 2, "2": 2, "3": 2}
    assert stats["stale_age"] == {"2": 2, "3": 2}
    assert stats["trained_completion_tokens_log2"] == {"0": 2, "1": 1, "2": 2, "3": 1}
    assert stats["stale_completion_tokens_log2"] == {"0": 2, "2": 1, "3": 1}
    assert stats["bound"] == "max_staleness 1 policy versions, so at most 8 rows outstanding"
    assert stats["units"]["policy_version, max_staleness"] == "policy versions"


def test_take_marks_whole_rows_without_versions_of_tokens():
    """Without token_policy_versions all tokens are as old as the row."""
    broker = Broker(clock=FakeClock())
    broker.create_table(rollouts_spec(0, "mask"), exist_ok=False)
    plain = ["uid", "group_id", "policy_version_start", "completion_token_ids"]
    broker.put("rollouts", rollouts("a", 0, [[0, 0], [0]]).select(plain), "", NOW)
    broker.put("rollouts", rollouts("b", 1, [[1], []]).select(plain), "", NOW)
    broker.announce("rollouts", 1)
    answer = broker.take("rollouts", TakeRequest(consumer="actor", max_rows=4), None, NOW)
    assert answer.table["stale_tokens"].to_pylist() == [[True, True], [True], [False], []]


@pytest.mark.parametrize("policy", ["pace", "drop"])
def test_take_without_stale_tokens_has_no_marks_for_them(policy):
    """Where old rows are dropped there is nothing to mark; other consumers get no ages at all."""
    broker = Broker(clock=FakeClock())
    broker.create_table(graded_spec(1, policy), exist_ok=False)
    broker.put("rollouts", rollouts("a", 0, [[0], [0]]), "", NOW)
    names = broker.take("rollouts", TakeRequest(consumer="actor", max_rows=4), None, NOW).table.schema.names
    assert "staleness" in names
    assert "stale_tokens" not in names
    recorded = broker.take("rollouts", TakeRequest(consumer="recorder", max_rows=4), None, NOW)
    assert recorded.max_staleness is None
    assert "staleness" not in recorded.table.schema.names


def test_column_of_the_table_hides_the_computed_one():
    """A table may keep the age that its trainer wrote down; who asks for that column gets that."""
    plain = rollouts_spec(1)
    own = Column(name="staleness", type=pa.int32(), meaning="age at training", writer="actor")
    broker = Broker(clock=FakeClock())
    broker.create_table(rollouts_spec(1, columns=(*plain.columns, own)), exist_ok=False)
    columns = ["uid", "group_id", "policy_version_start", "completion_token_ids"]
    broker.put("rollouts", rollouts("a", 0, [[0], [0]]).select(columns), "", NOW)
    request = TakeRequest(consumer="actor", max_rows=4)
    table = broker.take("rollouts", request, ["staleness"], NOW).table
    assert table.schema.names.count("staleness") == 1
    assert table["staleness"].to_pylist() == [None, None]


def test_mask_needs_versions_that_are_there():
    """token_policy_versions must be a list of integers, put with policy_version_start."""
    late = Column(name="token_policy_versions", type=pa.list_(pa.int32()), meaning="versions", writer="actor")
    with pytest.raises(
        InvalidRequestError, match="must be a list of integers by the writer of policy_version_start"
    ):
        rollouts_spec(1, "mask", columns=(*rollouts_spec(1).columns, late))
    rollouts_spec(1, "drop", columns=(*rollouts_spec(1).columns, late))


def test_group_with_equal_rewards_is_skipped_and_replaced():
    """All right or all wrong teaches nothing: the group leaves, its prompt is done, another prompt is granted."""
    ledger = with_prompts(0, "pace", is_graded=True)
    gate = ledger.gates["rollouts"]
    taken = take_prompts(ledger, 0)
    assert take_prompts(ledger, 0) is None
    put_rollouts(ledger, "p0", 0, [0], [1.0])
    assert gate.counts["uniform"] == 0
    put_rollouts(ledger, "p0", 0, [1], [1.0])
    put_rollouts(ledger, "p1", 0, rewards=[1.0, 0.5])
    assert gate.counts["uniform"] == 2
    assert gate.outstanding == 2
    assert {row.group_id for row in ledger.table("rollouts").rows.values()} == {"p1"}
    ledger.ack("prompts", "rollout", taken.lease.lease_id, None)
    assert ledger.table("prompts").find("p0") is None
    replaced = take_prompts(ledger, 0)
    assert [row.uid for row in replaced.lease.rows()] == ["p2"]
    put_rollouts(ledger, "p2", 0, rewards=[0.0, None])
    assert [row.uid for row in take_batch(ledger).lease.rows()] == ["p1/0", "p1/1", "p2/0", "p2/1"]
    assert put_rollouts(ledger, "p0", 0).num_duplicates == 2


@pytest.mark.parametrize(
    ("rewards", "is_skipped"),
    [
        ((0.0, 0.0), True),
        ((1.0, 1.0), True),
        ((0.0, 1.0), False),
        ((None, None), False),
        ((1.0, None), False),
        ((float("nan"), float("nan")), False),
    ],
)
def test_group_is_skipped_only_if_all_values_are_there_and_equal(rewards, is_skipped):
    """What is missing or not a number equals nothing; skipped values are freed."""
    broker = Broker(clock=FakeClock())
    broker.create_table(graded_spec(1), exist_ok=False)
    broker.put("rollouts", rollouts("a", 0, [[0], [0, 0]], rewards), "", NOW)
    stats = broker.stats("rollouts")["rollouts"]
    assert stats["uniform"] == (2 if is_skipped else 0)
    assert (stats["bytes"] == 0) == is_skipped
    assert stats["consumers"]["actor"]["ready"] == (0 if is_skipped else 2)


def test_end_of_a_table_comes_although_groups_were_skipped():
    """Skipped rows count as put: the trainer learns the end, nobody waits for what was skipped."""
    ledger = make_ledger(0, is_graded=True)
    ledger.table("rollouts").seal(2 * GROUP)
    put_rollouts(ledger, "p0", 0, rewards=[1.0, 1.0])
    put_rollouts(ledger, "p1", 0, rewards=[1.0, 0.0])
    request = TakeRequest(consumer="actor", max_rows=4, min_rows=4)
    last = ledger.take("rollouts", request, 0.0)
    assert [row.uid for row in last.lease.rows()] == ["p1/0", "p1/1"]
    ledger.ack("rollouts", "actor", last.lease.lease_id, None)
    assert ledger.take("rollouts", request, 0.0).status == "sealed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "fifo"}, "sampler must be groups of two rows or more, got 'fifo'"),
        ({"skip_equal": "media"}, "column must be a number column among"),
        ({"skip_equal": "advantage"}, "column must be a number column among"),
        ({"name": "other"}, "consumer must be the staleness consumer, so that what is skipped makes room"),
    ],
)
def test_skip_equal_that_cannot_work_is_refused(changes, message):
    """Only whole groups, only numbers that are there in time, only where it makes room at the entrance."""
    values = {"name": "actor", "columns": ("policy_version_start",), "sampler": "groups"}
    consumers = {"actor": ConsumerSpec(**values)}
    values |= {"skip_equal": "policy_version_start"} | changes
    consumers[values["name"]] = ConsumerSpec(**values)
    with pytest.raises(InvalidRequestError, match=message):
        rollouts_spec(consumers=tuple(consumers.values()))


def test_sampler_added_later_must_know_the_values_of_rows_that_are_there():
    """A consumer that skips groups by a column which nobody watched is refused; by a new column it may come."""
    spec = graded_spec(1, staleness=None, consumers=graded_spec(1).consumers[1:])
    late = graded_spec(1).consumers[0]
    with pytest.raises(SchemaMismatchError) as caught:
        evolve(spec, [], [late])
    assert str(caught.value).endswith(
        "consumer 'actor': expected mix and skip_equal of new columns or of [], got ['reward']"
    )
    score = Column(name="score", type=pa.float32(), meaning="a mark", writer="judge", nullable=True)
    judge = ConsumerSpec(name="judge", columns=("score",), sampler="groups", skip_equal="score")
    assert evolve(spec, [score], [judge]).label_columns() == ["score"]
