"""One batch for all ranks of the trainer, from a real queue: who trains which rows, and who fetches which columns."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from modalities.base import EncodingProfile, MediaLimits
from modalities.media import MediaTable
from modalities.registry import load_modalities
from modalities.routing import layer_groups, routing_columns, routing_to_arrow
from relax.config import RunConfig
from relax.data.manifest import Manifest
from relax.data.media import MediaWriter
from relax.data.prompts import PromptBuilder, prompts_to_arrow
from relax.records import ACTOR_READS, SAMPLE_COLUMNS, RunShape, table_specs
from tests.kit.trainer_ranks import rank_processes

NUM_GROUPS, GROUP_SIZE, NUM_EXPERTS = 12, 2, 4
LAYER_GROUPS = layer_groups(2, 1)
LAYOUTS = [{"dp": 2}, {"pp": 2}, {"tp": 2}]


@pytest.fixture(scope="module")
def seen(job_home):
    """What two ranks held under each layout."""
    return _held_by_two(job_home, LAYOUTS)


def _held_by_two(job_home, layouts, *words):
    """Return what each of two ranks held, for each layout."""
    from tests.kit.server import queue_server

    with queue_server() as (uri, _):
        _fill(uri, job_home, rewards=(0.0, 1.0) if not words else (1.0, 1.0))
        program = [sys.executable, "-m", "tests.kit.batch_ranks", uri, str(job_home / "model")]
        with rank_processes(2, [*program, json.dumps(layouts), *words]) as ranks:
            outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], outputs
    told = [[json.loads(line) for line in output.splitlines() if line.startswith("{")] for output in outputs]
    return list(zip(*told, strict=True))


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=["dp", "pp", "tp"])
def test_ranks_hold_one_batch_under_one_plan(seen, number) -> None:
    """Leases, rows, their order and their tokens are the same on both ranks, and no step gets another's rows."""
    first, second = seen[number]
    for key in ("lease_ids", "uids", "tokens", "columns"):
        assert first[key] == second[key]
    assert len(set(first["uids"])) == 4 * GROUP_SIZE
    others = {uid for index, ranks in enumerate(seen) if index != number for uid in ranks[0]["uids"]}
    assert not others & set(first["uids"])


def test_data_parallel_ranks_share_out_whole_groups_and_their_heavy_columns(seen) -> None:
    """Every row is one rank's, groups stay whole, and media and experts are only where they are trained on."""
    ranks = seen[0]
    assert sorted(ranks[0]["own"] + ranks[1]["own"]) == list(range(4 * GROUP_SIZE))
    assert sorted(ranks[0]["own_prompts"] + ranks[1]["own_prompts"]) == list(range(4))
    for rank in ranks:
        assert rank["media"] == rank["own_prompts"]
        assert rank["experts"] == rank["own"]


def test_later_pipeline_stages_fetch_no_media(seen) -> None:
    """Both stages train all rows and need their experts; pixels and sounds are on the first alone."""
    first, last = seen[1]
    assert first["own"] == last["own"] == list(range(4 * GROUP_SIZE))
    assert (first["media"], last["media"]) == ([0, 1, 2, 3], [])
    assert "media" not in last["read"]
    assert first["experts"] == last["experts"] == first["own"]


def test_pipeline_stages_fetch_the_experts_of_their_own_layers(seen) -> None:
    """Each reads the column of its layer and no other; without stages a rank has both."""
    for stage, rank in enumerate(seen[1]):
        assert rank["read"]["rollouts"] == [f"routed_experts_{stage}_{stage + 1}", "routed_experts_shape"]
        assert rank["first_token"] == [[2 * stage, 2 * stage + 1]]
    assert seen[0][0]["first_token"] == [[0, 1], [2, 3]]


def test_tensor_parallel_ranks_share_what_one_fetched(seen) -> None:
    """Both embed all prompts, so both have the media."""
    for rank in seen[2]:
        assert (rank["media"], rank["experts"]) == ([0, 1, 2, 3], rank["own"])
    assert "media" in seen[2][0]["read"]
    assert seen[2][1]["read"] == {}


def test_ranks_sample_dynamically_and_each_gets_a_group(job_home) -> None:
    """Where no group teaches but one, the last take gives the other rank one; both know the same of it."""
    words = ("algorithm.sampling.dynamic=true", "algorithm.sampling.max_refills=1")
    ((first, second),) = _held_by_two(job_home, [{"dp": 2}], *words)
    for key in ("lease_ids", "uids", "tokens", "metrics"):
        assert first[key] == second[key]
    assert set(first["uids"]) == {"g0/0", "g0/1", "g4/0", "g4/1"}
    assert [rank["own"] for rank in (first, second)] == [[0, 1], [2, 3]]
    assert first["metrics"]["sampling/num_groups_missing"] == 2
    assert len(first["lease_ids"]) == 2


def test_light_columns_are_those_that_the_actor_reads(seen) -> None:
    """Neither media nor experts come with the tokens of the whole batch."""
    columns = set(seen[0][0]["columns"])
    assert columns >= set(ACTOR_READS)
    assert not [name for name in columns if name.startswith(("image", "video", "audio", "routed"))]


def _fill(uri: str, home, rewards: tuple[float, float]) -> None:
    """Put prompts of the toy data set and two made-up rollouts of each; the first group's rewards always differ."""
    from flight.client import QueueClient

    modalities = load_modalities(EncodingProfile.from_pretrained(home / "model"), MediaLimits())
    media = MediaTable(modalities, RunConfig().media.keep)  # type: ignore[arg-type]
    shape = RunShape(prompts_per_step=4, group_size=GROUP_SIZE, max_staleness=9)
    specs = table_specs(shape, media.columns(), routing_columns(NUM_EXPERTS, LAYER_GROUPS))
    with QueueClient(uri, identity="maker") as client:
        for name in ("media", "prompts", "rollouts"):
            client.create_table(specs[name])
        rows, items = _prompts(home, modalities)
        MediaWriter(client, media, writer="preprocess").put("prompts", rows, items, deadline_s=20.0)
        taken = client.take("prompts", "rollout", max_rows=NUM_GROUPS, policy_version=0).table
        client.put("rollouts", _rollouts(taken, rewards), writer="rollout")


def _prompts(home, modalities):
    manifest = Manifest(str(home / "toy" / "train.jsonl"), modalities)
    builder = PromptBuilder(home / "model", modalities, max_prompt_tokens=2048)
    prompts = [builder.build(manifest[line % len(manifest)]) for line in range(NUM_GROUPS)]
    table = prompts_to_arrow(prompts)
    uids = pa.array([f"g{number}" for number in range(NUM_GROUPS)])
    epochs = pa.array([0] * NUM_GROUPS, pa.int32())
    rows = table.append_column("uid", uids).append_column("group_id", uids).append_column("epoch", epochs)
    return rows, [item for prompt in prompts for item in prompt.media]


def _rollouts(prompts: pa.Table, rewards: tuple[float, float]) -> pa.Table:
    rng = np.random.default_rng(0)
    rows = prompts.take(pa.array(np.repeat(np.arange(prompts.num_rows), GROUP_SIZE)))
    count = rows.num_rows
    lengths = rng.integers(1, 5, count).tolist()
    made = {
        "completion_token_ids": [[7] * length for length in lengths],
        "completion_text": ["x"] * count,
        "rollout_logprobs": [[-1.0] * length for length in lengths],
        "token_policy_versions": [[0] * length for length in lengths],
        "policy_version_start": [0] * count,
        "policy_version_end": [0] * count,
        "reward": [float(number == 0) if number < 2 else rewards[number % 2] for number in range(count)],
        "finish_reason": ["stop"] * count,
        "temperature": [1.0] * count,
        "seed": [0] * count,
        "rollout_worker": ["rollout-0"] * count,
        "generate_s": [0.0] * count,
        "created_at": [datetime.now(UTC)] * count,
    }
    columns = {column.name: rows[column.name] for column in SAMPLE_COLUMNS if column.name not in made}
    columns |= {c.name: pa.array(made[c.name], c.type) for c in SAMPLE_COLUMNS if c.name in made}
    names = rows["uid"].to_pylist()
    columns["uid"] = pa.array([f"{name}/{index % GROUP_SIZE}" for index, name in enumerate(names)])
    columns["group_id"] = pa.array(names)
    tokens = [len(ids) for ids in rows["prompt_token_ids"].to_pylist()]
    experts = [
        np.tile(np.array([[0, 1], [2, 3]], np.uint8), (prompt + length - 1, 1, 1))
        for prompt, length in zip(tokens, lengths, strict=True)
    ]
    return pa.table(columns | routing_to_arrow(experts, NUM_EXPERTS, LAYER_GROUPS))
