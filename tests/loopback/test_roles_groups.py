"""Dynamic sampling over a real queue: groups that teach nothing are replaced, recorded, and hold up nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from flight.client import QueueClient
from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.sections import SamplingConfig
from relax.config import RunConfig
from relax.records import ACTOR_READS, INSTANT, PER_TOKEN, RECORDED, STRINGS, TOKENS, RunShape, table_specs
from relax.roles.groups import GroupCollector, Harvest, shared_out
from relax.roles.service import Service
from tests.kit.control import FakeMember

GROUP = 2
EQUAL, DIFFERENT = (1.0, 1.0), (1.0, 0.0)


@pytest.fixture
def service(client: QueueClient) -> Service:
    """An actor's service with the tables of a run of two groups a step, on policy."""
    shape = RunShape(prompts_per_step=2, group_size=GROUP, max_staleness=0)
    specs = table_specs(shape, (), ())
    for name in ("media", "prompts", "rollouts"):
        client.create_table(specs[name])
    sampling = SamplingConfig(dynamic=True, max_refills=2)
    config = RunConfig(
        prompts_per_step=2, group_size=GROUP, max_staleness=0, algorithm=AlgorithmConfig(sampling=sampling)
    )
    where = Path()
    return Service(
        role="actor",
        index=0,
        config=config,
        run_dir=where,
        model_dir=where,
        queue=client,
        control=FakeMember(),
    )


@contextmanager
def rolling_out(uri: str, *groups: tuple[float, float]) -> Iterator[None]:
    """Put a prompt for each group, and let a thread roll them out one by one as the staleness bound admits them."""
    uids = [f"g{index}" for index in range(len(groups))]
    stop = threading.Event()

    def roll_out() -> None:
        with QueueClient(uri, identity="rollout", deadline_s=20.0) as queue:
            for uid, group in zip(uids, groups, strict=True):
                lease = None
                while not stop.is_set() and (lease is None or lease.status != "rows"):
                    lease = queue.take("prompts", "rollout", max_rows=1, policy_version=0, deadline_s=0.2)
                if stop.is_set() or lease is None:
                    return
                queue.put("rollouts", rollout_rows(uid, group), writer="rollout")
                queue.ack("prompts", "rollout", lease_id=lease.lease_id)

    with QueueClient(uri, identity="preprocess") as queue:
        queue.put("prompts", prompt_rows(uids), writer="preprocess")
    thread = threading.Thread(target=roll_out)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(20.0)
        assert not thread.is_alive()


def prompt_rows(uids: list[str]) -> pa.Table:
    """Return prompts without media."""
    count = len(uids)
    return pa.table(
        {
            "uid": uids,
            "prompt_index": pa.array(range(count), pa.int64()),
            "source": ["toy"] * count,
            "epoch": pa.array([0] * count, pa.int32()),
            "modality": ["text"] * count,
            "messages": ["[]"] * count,
            "prompt_text": ["?"] * count,
            "prompt_token_ids": pa.array([[1, 2]] * count, TOKENS),
            "reference_answer": ["red"] * count,
            "media_paths": pa.array([[]] * count, STRINGS),
            "media_ids": pa.array([[]] * count, STRINGS),
        }
    )


def rollout_rows(uid: str, rewards: tuple[float, float]) -> pa.Table:
    """Return the rows of a whole group with these rewards, two tokens each."""
    count = len(rewards)
    return pa.table(
        {
            "uid": [f"{uid}/{index}" for index in range(count)],
            "group_id": [uid] * count,
            "prompt_index": pa.array([0] * count, pa.int64()),
            "source": ["toy"] * count,
            "epoch": pa.array([0] * count, pa.int32()),
            "modality": ["text"] * count,
            "prompt_text": ["?"] * count,
            "prompt_token_ids": pa.array([[1, 2]] * count, TOKENS),
            "completion_token_ids": pa.array([[3, 4]] * count, TOKENS),
            "completion_text": ["red"] * count,
            "rollout_logprobs": pa.array([[-1.0, -2.0]] * count, PER_TOKEN),
            "token_policy_versions": pa.array([[0, 0]] * count, TOKENS),
            "policy_version_start": pa.array([0] * count, pa.int64()),
            "policy_version_end": pa.array([0] * count, pa.int64()),
            "reward": pa.array(rewards, pa.float32()),
            "reference_answer": ["red"] * count,
            "finish_reason": ["stop"] * count,
            "temperature": pa.array([1.0] * count, pa.float32()),
            "seed": pa.array([0] * count, pa.int64()),
            "rollout_worker": ["rollout-0"] * count,
            "generate_s": pa.array([0.1] * count, pa.float32()),
            "media_paths": pa.array([[]] * count, STRINGS),
            "media_ids": pa.array([[]] * count, STRINGS),
            "created_at": pa.array([datetime.now(UTC)] * count, INSTANT),
        }
    )


def collect(service: Service) -> Harvest | None:
    """Return a batch as the actor takes it on policy version 0."""
    return GroupCollector(service, [*ACTOR_READS]).collect(0)


def groups_of(harvest: Harvest | None) -> list[str]:
    """Return the groups of a batch in order."""
    assert harvest is not None
    return list(dict.fromkeys(harvest.table["group_id"].to_pylist()))


def counts_of(harvest: Harvest) -> tuple[float, ...]:
    """Return dropped groups, refills and missing groups."""
    names = ("num_groups_dropped", "num_refills", "num_groups_missing")
    return tuple(harvest.metrics[f"sampling/{name}"] for name in names)


def test_batch_is_filled_up_with_groups_that_teach(service, uri):
    """On policy only two groups are admitted; those skipped make room for others, before any new policy version."""
    with rolling_out(uri, EQUAL, DIFFERENT, EQUAL, DIFFERENT, DIFFERENT):
        harvest = collect(service)
        assert groups_of(harvest) == ["g1", "g3"]
        assert counts_of(harvest) == (2, 2, 0)
        assert len(harvest.lease_ids) == 2


def test_skipped_groups_are_recorded_and_let_their_prompts_go(service, client, uri):
    """Their rows have optimizer step 0 and no advantage, and nothing of them stays."""
    with rolling_out(uri, EQUAL, DIFFERENT, DIFFERENT):
        harvest = collect(service)
        lease = client.take("rollouts", "recorder", max_rows=100, columns=[*RECORDED])
        client.ack("rollouts", "recorder", lease_id=lease.lease_id)
    recorded = lease.table
    assert recorded["uid"].to_pylist() == ["g0/0", "g0/1"]
    assert recorded["optimizer_step"].to_pylist() == [0, 0]
    assert recorded["trained_policy_version"].to_pylist() == [0, 0]
    assert recorded["advantages"].to_pylist() == [[0.0, 0.0]] * 2
    assert np.isnan(recorded["importance_ratio"].to_numpy()).all()
    assert client.stats("rollouts")["rows"] == harvest.table.num_rows
    assert "g0" not in client.read("prompts", columns=["modality"])["uid"].to_pylist()


def test_refills_end_and_the_batch_is_what_there_is(service, uri):
    """One group teaches at first, and none of the two refills does."""
    with rolling_out(uri, DIFFERENT, EQUAL, EQUAL, EQUAL, DIFFERENT):
        harvest = collect(service)
        assert groups_of(harvest) == ["g0"]
        assert counts_of(harvest) == (3, 2, 1)
        assert harvest.metrics["sampling/reward_mean"] == 0.875  # of all that was taken, not of what is left


def test_batch_without_any_group_that_teaches_is_what_came_last(service, uri):
    """A solved task goes on: the step has no gradient, but it ends."""
    with rolling_out(uri, *[EQUAL] * 6):
        harvest = collect(service)
        assert groups_of(harvest) == ["g4", "g5"]
        assert counts_of(harvest) == (4, 2, 0)


def test_collecting_ends_when_the_role_has_to_leave(service, uri):
    """Nothing is taken any more."""
    service.control.phase = "drain"
    with rolling_out(uri, DIFFERENT, DIFFERENT):
        assert collect(service) is None


def test_without_dynamic_sampling_all_groups_are_taken(service, uri):
    """One lease, no metrics."""
    service.config.algorithm.sampling.dynamic = False
    with rolling_out(uri, EQUAL, DIFFERENT):
        harvest = collect(service)
        assert groups_of(harvest) == ["g0", "g1"]
        assert harvest.metrics == {}


def test_shared_out_rows_keep_groups_whole_and_ranks_even() -> None:
    """The longest group goes alone, and no rank goes without."""
    sizes = {"g0": 2, "g1": 9, "g2": 3, "g3": 3}
    table = pa.table(
        {
            "group_id": [group_id for group_id in sizes for _ in range(GROUP)],
            "prompt_token_ids": pa.array([[1]] * 8, TOKENS),
            "completion_token_ids": pa.array([[2] * n for n in sizes.values() for _ in range(GROUP)], TOKENS),
        }
    )
    rows, counts = shared_out(table, 2)
    assert rows["group_id"].to_pylist() == ["g1", "g1", "g2", "g2", "g3", "g3", "g0", "g0"]
    assert counts == (2, 6)
    assert shared_out(table, 4)[1] == (2, 2, 2, 2)
