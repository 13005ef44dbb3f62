"""Writes the files that tests/unit/flight/journal/test_golden.py reads: `python -m tests.kit.journal_golden DIR`.

DIR must not exist. Files of a format that was released are never written anew: a later one gets a directory of its own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from flight.journal.broker import JournaledBroker
from flight.journal.transfer import snapshot_directory
from flight.schema import Column, ConsumerSpec
from flight.state.ledger import TakeRequest
from flight.state.plan import SplitRules
from flight.state.plan_book import PlanOrder
from tests.kit.clock import FakeClock
from tests.kit.journals import (
    NOW,
    StatelessDisk,
    crashed,
    media_rows,
    media_specs,
    open_journal,
    plain_rows,
    plain_spec,
    prompt_rows,
    state_of,
)
from tests.kit.queues import BATCH, GROUP, prompts_spec, rollouts_spec

CHECKPOINT_ID = "golden"


def group_rows(group: str, version: int) -> pa.RecordBatch:
    """Return the rollout's part of a whole group."""
    return pa.record_batch(
        {
            "uid": [f"{group}/{index}" for index in range(GROUP)],
            "group_id": [group] * GROUP,
            "policy_version_start": pa.array([version] * GROUP, pa.int64()),
            "completion_token_ids": pa.array(
                [[1] * (index + 1) for index in range(GROUP)], pa.list_(pa.int32())
            ),
        }
    )


def taking(consumer: str, max_rows: int, version: int | None = None) -> TakeRequest:
    """Return a request that waits for nothing."""
    return TakeRequest(consumer=consumer, max_rows=max_rows, policy_version=version, lease_s=60.0)


def begin(broker: JournaledBroker) -> None:
    """What a checkpoint and moved rows will hold."""
    media, questions = media_specs(age_s=40.0)
    for spec in (
        replace(questions, name="questions"),
        media,
        prompts_spec(fsync="batch", max_attempts=2),
        rollouts_spec(2, "drop", fsync="batch"),
    ):
        broker.create_table(spec, exist_ok=False)
    uids = [f"p{number}" for number in range(8)]
    broker.put("prompts", pa.record_batch({"uid": uids, "text": uids}), "preprocess", NOW)
    broker.put("media", media_rows("a", "b", "c"), "", NOW)
    broker.put("questions", prompt_rows(q0=["a", "b"], q1=["b"], q2=[]), "preprocess", NOW)
    lease = broker.take("prompts", taking("rollout", 3), None, NOW)
    for uid in ("p0", "p1"):
        broker.put("rollouts", group_rows(uid, 0), "rollout", NOW)
    broker.ack("prompts", "rollout", lease.lease_id, ["p0", "p1"])


def go_on(broker: JournaledBroker, clock: FakeClock) -> None:
    """Decisions of all kinds."""
    lease = broker.take("prompts", taking("rollout", 3), None, NOW)
    for uid in lease.table.column("uid").to_pylist()[:2]:
        broker.put("rollouts", group_rows(uid, 0), "rollout", NOW)
    broker.ack("prompts", "rollout", lease.lease_id, None)
    order = PlanOrder(
        consumer="actor",
        step=1,
        max_rows=BATCH,
        min_rows=GROUP,
        policy_version=None,
        balance=("completion_token_ids",),
        rules=SplitRules(num_ranks=2),
    )
    plan = broker.plan("rollouts", order, lease_s=50.0, member="rank 0", wait=NOW).plan
    if plan is None:
        raise RuntimeError("golden: there must be rows to plan, got none")
    broker.renew("rollouts", "actor", plan.plan_id, 70.0)
    broker.ack("rollouts", "actor", plan.plan_id, None, 1)
    broker.announce("rollouts", 1)
    broker.set_max_staleness("rollouts", 0)
    broker.put("rollouts", group_rows("p7", 1), "rollout", NOW)
    broker.take("rollouts", taking("actor", GROUP, version=9), None, NOW)
    for reason in ("once", "twice"):
        lease = broker.take("prompts", taking("rollout", 1), None, NOW)
        broker.nack("prompts", "rollout", lease.lease_id, None, reason=reason, requeue=True)
    broker.requeue("prompts", "rollout", None)
    column = Column(name="note", type=pa.string(), meaning="a note", writer="judge", nullable=True)
    broker.alter_table("prompts", [column], [ConsumerSpec(name="judge", columns=("text",))])
    small = plain_spec(name="small", capacity_rows=2, max_attempts=1)
    for spec in (small, plain_spec(name="short"), plain_spec(name="gone")):
        broker.create_table(spec, exist_ok=False)
    broker.put("small", plain_rows("a", "b"), "", NOW)
    lease = broker.take("small", taking("reader", 1), None, NOW)
    broker.nack("small", "reader", lease.lease_id, None, reason="bad", requeue=True)
    broker.put("small", plain_rows("c"), "", NOW)
    broker.put("short", plain_rows("a"), "", NOW)
    broker.truncate_table("short")
    broker.put("short", plain_rows("a"), "", NOW)
    broker.seal("short", 5)
    broker.drop_table("gone")
    lease = broker.take("questions", taking("reader", 1), None, NOW)
    broker.ack("questions", "reader", lease.lease_id, None)
    broker.take("questions", taking("reader", 1), None, NOW)
    clock.advance(61.0)
    broker.stats()


def write(path: Path) -> None:
    """Live a life and keep what it leaves behind."""
    clock, disk = FakeClock(), StatelessDisk()
    with tempfile.TemporaryDirectory() as scratch:
        live = Path(scratch) / "live"
        broker = open_journal(live, clock, disk=disk)
        begin(broker)
        broker.checkpoint(sparse=1.0)
        broker.prepare(CHECKPOINT_ID)
        broker.commit(CHECKPOINT_ID)
        broker.put("rollouts", group_rows("p2", 0), "rollout", NOW)
        disk.without = True
        broker.rewind(CHECKPOINT_ID)
        broker.close()
        broker = open_journal(live, clock, disk=disk)
        go_on(broker, clock)
        broker.close()
        crashed(live, path)
        again = open_journal(crashed(path, Path(scratch) / "again"), FakeClock(clock()))
        (path / "state.json").write_text(json.dumps(state_of(again), default=str, indent=1) + "\n")
        again.close()
        snapshot_directory(crashed(path, Path(scratch) / "moved"), path / "queue.snapshot")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if target.exists():
        raise FileExistsError(f"golden: {target} must not exist yet; what was released is never written anew")
    write(target)
