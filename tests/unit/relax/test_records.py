"""The tables of a run: numbers that follow from its shape, who writes and who needs each column."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flight.schema import Column
from relax.records import MEDIA_FACTS, RunShape, mean_rewards, table_specs

MEDIA = [
    *(Column(name=name, type=pa.string(), meaning=name, writer="preprocess") for name in MEDIA_FACTS),
    Column(name="image_patches", type=pa.binary(), meaning="patches", writer="preprocess", nullable=True),
]
ROUTING = [
    Column(name="routed_experts", type=pa.binary(), meaning="experts", writer="rollout", nullable=True)
]


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_table_specs_follow_the_shape_of_the_run(max_staleness):
    """Tickets, groups, the bound, and room for what the bound admits."""
    shape = RunShape(prompts_per_step=6, group_size=4, max_staleness=max_staleness, lookahead_steps=2)
    specs = table_specs(shape, MEDIA, ROUTING)
    prompts, rollouts = specs["prompts"], specs["rollouts"]
    assert (prompts.tickets.table, prompts.tickets.rows_per_ticket) == ("rollouts", 4)
    assert prompts.capacity_rows == (max_staleness + 3) * 6
    assert rollouts.group_size == 4
    assert rollouts.staleness.max_staleness == max_staleness
    assert rollouts.staleness.rows_per_version == 24
    assert rollouts.staleness.consumer == "actor"
    assert rollouts.capacity_rows > (max_staleness + 1) * 24


def test_table_specs_refer_to_media_and_hold_them_once():
    """Prompts and rollouts name rows of table media, which nobody has to finish unless they are recorded."""
    specs = table_specs(RunShape(prompts_per_step=2, group_size=2, max_staleness=0), MEDIA, ROUTING)
    assert next(iter(specs)) == "media"
    assert "image_patches" in specs["media"].columns_by_name
    for name in ("prompts", "rollouts", "eval_prompts", "eval_rollouts"):
        assert "image_patches" not in specs[name].columns_by_name
        assert specs[name].columns_by_name["media_ids"].references == "media"
    assert specs["media"].consumers == ()
    recorded = RunShape(prompts_per_step=2, group_size=2, max_staleness=0, record_media=True)
    assert [each.name for each in table_specs(recorded, MEDIA, ROUTING)["media"].consumers] == ["recorder"]
    assert all("routed_experts" in each.columns for each in specs["rollouts"].consumers)


def test_table_specs_say_of_every_column_who_writes_it():
    """Samples come from the rollout role, what training saw from the actor."""
    specs = table_specs(RunShape(prompts_per_step=2, group_size=2, max_staleness=0), MEDIA, ROUTING)
    writers = {column.name: column.writer for column in specs["rollouts"].columns}
    assert (writers["reward"], writers["rollout_logprobs"]) == ("rollout", "rollout")
    assert (writers["advantages"], writers["optimizer_step"]) == ("actor", "actor")
    assert {column.writer for column in specs["prompts"].columns} == {"preprocess"}


def test_table_specs_have_a_column_for_each_part_of_the_reward():
    """Beside the reward, with the reason of a failure; the recorder and the driver see them, the actor does not."""
    shape = RunShape(prompts_per_step=2, group_size=2, max_staleness=0, reward_labels=("math", "form"))
    specs = table_specs(shape, MEDIA, ROUTING)
    names = {"reward_math", "reward_form", "reward_error"}
    for table in ("rollouts", "eval_rollouts"):
        columns = specs[table].columns_by_name
        assert names <= set(columns)
        assert all(columns[name].nullable and columns[name].writer == "rollout" for name in names)
    seen = {each.name: names <= set(each.columns) for each in specs["rollouts"].consumers}
    assert seen == {"actor": False, "recorder": True}
    assert names <= set(specs["eval_rollouts"].consumers[0].columns)


def test_table_specs_of_agents_have_a_loss_mask_that_the_actor_reads():
    """It and the number of turns are recorded; runs without agents have neither."""
    shape = RunShape(prompts_per_step=2, group_size=2, max_staleness=0, agents=True)
    specs = table_specs(shape, MEDIA, ROUTING)
    seen = {each.name: {"loss_mask", "num_turns"} & set(each.columns) for each in specs["rollouts"].consumers}
    assert seen == {"actor": {"loss_mask"}, "recorder": {"loss_mask", "num_turns"}}
    plain = table_specs(RunShape(prompts_per_step=2, group_size=2, max_staleness=0), MEDIA, ROUTING)
    assert "loss_mask" not in plain["rollouts"].columns_by_name


def test_mean_rewards_are_by_modality_in_order():
    """Each modality's own mean; nothing for none."""
    rows = pa.table(
        {"modality": ["video", "audio", "video"], "reward": pa.array([1.0, 0.5, 0.0], pa.float32())}
    )
    assert list(mean_rewards(rows).items()) == [("audio", 0.5), ("video", 0.5)]
    assert mean_rewards(rows.slice(0, 0)) == {}
