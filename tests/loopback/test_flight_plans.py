"""Ranks as processes of their own: one plan a step, also for a rank that is killed and comes again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.flight as paflight
import pytest

from flight.errors import InvalidRequestError, LeaseLostError
from flight.schema import ConsumerSpec, MixSpec
from tests.kit.queues import graded_spec, prompts_spec, rollouts_spec
from tests.kit.server import REPOSITORY

NUM_RANKS, NUM_STEPS, BATCH = 3, 4, 8

RANK = """
import json, sys, time
from flight.client import QueueClient

uri, rank, crash_step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
first_step = int(sys.argv[4])
with QueueClient(uri, identity=f"rank-{rank}", deadline_s=30.0) as client:
    for step in range(first_step, 4):
        plan = client.plan(
            "rollouts", "actor", step=step, num_ranks=3, max_rows=8, balance=["completion_token_ids"],
            max_tokens_per_micro_batch=40, keep_groups=True, lease_s=60.0, deadline_s=30.0,
        )
        if plan.status == "finished":
            continue
        rows = client.fetch("rollouts", plan.plan_id, rank, columns=["completion_token_ids"])
        got = {"rank": rank, "step": step, "plan": plan.plan_id, "row_ids": plan.row_ids,
               "mine": rows["row_id"].to_pylist(), "micro_batch": rows["micro_batch"].to_pylist()}
        print(json.dumps(got), flush=True)
        if step == crash_step:
            time.sleep(600)
        # The ranks have trained: the last one to say so ends the step for all.
        uids = rows["uid"].to_pylist()
        if uids:
            client.ack("rollouts", "actor", lease_id=plan.plan_id, uids=uids, step=step)
"""


def rollouts(num_groups: int, *, first: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> pa.Table:
    """Return groups of two rows; group n has answers of n + 1 and 2 n + 1 tokens."""
    numbers = range(first, first + num_groups)
    names = [f"g{number}" for number in numbers for _ in range(2)]
    lengths = [length for number in numbers for length in (number + 1, 2 * number + 1)]
    return pa.table(
        {
            "uid": [f"{name}/{index % 2}" for index, name in enumerate(names)],
            "group_id": names,
            "policy_version_start": pa.array([0] * len(names), pa.int64()),
            "completion_token_ids": pa.array([[1] * length for length in lengths], pa.list_(pa.int32())),
            "reward": pa.array([rewards[index % 2] for index in range(len(names))], pa.float32()),
        }
    )


def start_rank(uri: str, rank: int, *, crash_step: int = -1, first_step: int = 0) -> subprocess.Popen[str]:
    """Run a rank, which prints what it got of each step."""
    return subprocess.Popen(
        [sys.executable, "-c", RANK, uri, str(rank), str(crash_step), str(first_step)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )


def test_ranks_agree_on_every_step_and_a_killed_one_comes_again(uri, client):
    """Three processes, four steps; one is killed in the middle of step 2 and a new process goes on with its part."""
    spec = rollouts_spec(3, "drop")
    client.create_table(rollouts_spec(3, "drop", consumers=spec.consumers[:1]))
    client.put("rollouts", rollouts(NUM_STEPS * BATCH // 2).drop_columns("reward"))
    ranks = [start_rank(uri, 0), start_rank(uri, 1, crash_step=2), start_rank(uri, 2)]
    try:
        seen = [json.loads(ranks[1].stdout.readline()) for _ in range(3)]
        os.kill(ranks[1].pid, signal.SIGKILL)
        ranks[1].communicate(timeout=30)
        ranks[1] = start_rank(uri, 1, first_step=2)
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(timeout=30)
            rank.stdout.close()
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    for output in outputs:
        seen += [json.loads(line) for line in output.splitlines()]
    trained = []
    for step in range(NUM_STEPS):
        of_step = [each for each in seen if each["step"] == step]
        assert len({each["plan"] for each in of_step}) == 1
        plans = [each["row_ids"] for each in of_step]
        assert all(plan == plans[0] for plan in plans)
        for each in of_step:
            planned = [row for micro_batch in each["row_ids"][each["rank"]] for row in micro_batch]
            assert each["mine"] == planned
        trained += [row for rank in plans[0] for micro_batch in rank for row in micro_batch]
    again = [each["mine"] for each in seen if (each["rank"], each["step"]) == (1, 2)]
    assert len(again) == 2
    assert again[0] == again[1]
    assert sorted(trained) == list(range(NUM_STEPS * BATCH))
    actor = client.stats("rollouts")["consumers"]["actor"]
    assert (actor["acked"], actor["redelivered"], actor["leased"]) == (NUM_STEPS * BATCH, 0, 0)


def test_plan_crosses_the_wire(client):
    """Client, server and errors: a plan, its parts by column and micro-batch, its end."""
    client.create_table(graded_spec(1, "mask"))
    client.put("rollouts", rollouts(6))
    client.announce("rollouts", 2)
    asked = {
        "step": 7,
        "num_ranks": 2,
        "max_rows": 8,
        "balance": ["completion_token_ids"],
        "keep_groups": True,
    }
    plan = client.plan("rollouts", "actor", **asked, max_tokens_per_micro_batch=12)
    assert (plan.status, plan.num_rows, plan.policy_version) == ("rows", 8, 2)
    assert sum(plan.sizes) == sum(number + 1 + 2 * number + 1 for number in range(4))
    assert plan == client.plan("rollouts", "actor", **asked, max_tokens_per_micro_batch=12)
    part = client.fetch("rollouts", plan.plan_id, 1, columns=["reward"])
    assert part["row_id"].to_pylist() == [row for each in plan.row_ids[1] for row in each]
    assert part.schema.names == [
        *["row_id", "uid", "group_id", "attempt", "micro_batch", "staleness", "stale_tokens", "reward"]
    ]
    assert all(part["stale_tokens"].combine_chunks().flatten().to_pylist())
    one = client.fetch("rollouts", plan.plan_id, 0, micro_batch=0)
    assert one["row_id"].to_pylist() == plan.row_ids[0][0]
    with pytest.raises(InvalidRequestError, match="all ranks of a step must agree"):
        client.plan("rollouts", "actor", **asked)
    assert client.ack("rollouts", "actor", lease_id=plan.plan_id, step=7) == 8
    with pytest.raises(LeaseLostError, match="ask for the plan of the step again"):
        client.fetch("rollouts", plan.plan_id, 0)
    done = client.plan("rollouts", "actor", **asked, max_tokens_per_micro_batch=12)
    assert (done.status, done.num_rows, done.row_ids) == ("finished", 0, [])
    missing = client.plan("rollouts", "actor", step=8, num_ranks=1, max_rows=8, deadline_s=0.2)
    assert (missing.status, missing.plan_id) == ("empty", "")


def test_lease_tells_the_bound_that_it_was_marked_by(client):
    """A take of the staleness consumer names K and the policy; another consumer's does not."""
    client.create_table(graded_spec(0, "reweight"))
    client.put("rollouts", rollouts(2))
    client.announce("rollouts", 1)
    lease = client.take("rollouts", "actor", max_rows=4)
    assert (lease.max_staleness, lease.staleness_policy) == (0, "reweight")
    assert lease.table["staleness"].to_pylist() == [1, 1, 1, 1]
    assert client.take("rollouts", "recorder", max_rows=4, deadline_s=0.0).max_staleness is None


def test_samplers_are_part_of_the_specification(client):
    """Mixing and dynamic sampling survive the wire, and do their work behind it."""
    client.create_table(graded_spec(3))
    mix = MixSpec(column="text", weights={"maths": 3.0}, other_weight=1.0)
    client.create_table(
        prompts_spec(consumers=(ConsumerSpec(name="rollout", columns=("text",), mix=mix),), tickets=None)
    )
    assert client.describe("prompts").consumers[0].mix == mix
    assert client.describe("rollouts") == graded_spec(3)
    texts = ["maths", "chat"] * 8
    client.put("prompts", pa.table({"uid": [f"p{index}" for index in range(16)], "text": texts}))
    taken = client.take("prompts", "rollout", max_rows=8).table["text"].to_pylist()
    assert taken.count("maths") == 6
    client.put("rollouts", rollouts(2, rewards=(1.0, 1.0)))
    client.put("rollouts", rollouts(1, first=5))
    stats = client.stats("rollouts")
    assert (stats["uniform"], stats["consumers"]["actor"]["ready"]) == (4, 2)


def test_malformed_plans_are_refused_and_the_server_goes_on(client):
    """Wrong types, unknown fields and nonsense get an error with a code; the next call is served."""
    client.create_table(rollouts_spec(1))
    plain = paflight.connect(client.uri)
    for body in (
        b"{}",
        b'{"table": "rollouts"}',
        b'{"step": "x"}',
        b"[1]",
        b'{"balance": {"a": 1}}',
        b"\xff",
    ):
        with pytest.raises(paflight.FlightServerError) as caught:
            list(plain.do_action(paflight.Action("plan", body)))
        assert json.loads(caught.value.extra_info)["code"] == "invalid_request"
    ticket = {"verb": "fetch", "table": "rollouts", "plan_id": "nobody's", "rank": -1}
    with pytest.raises(paflight.FlightServerError) as caught:
        list(plain.do_get(paflight.Ticket(json.dumps(ticket).encode())))
    assert json.loads(caught.value.extra_info)["code"] == "lease_lost"
    plain.close()
    client.ping()
