"""Layouts: places of ranks, what is refused, and how layers and tokens are shared out."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from relax.errors import ConfigError, TrainingError
from relax.train.attention import local_tokens
from relax.train.layout import LayoutConfig, ModelSizes, check_layout
from relax.train.runtime import start_parallel

SIZES = ModelSizes(
    num_layers=3,
    num_heads=4,
    num_groups=2,
    dense_width=48,
    num_experts=4,
    num_deepstack=2,
)


@pytest.mark.parametrize(
    ("settings", "num_procs", "data_parallel"),
    [
        ({}, 1, 1),
        ({"tp": 2, "pp": 3, "dp": 4, "cp": 5}, 120, 4),
        ({"ep": 2}, 2, 2),
        ({"ep": 2, "tp": 2}, 2, 1),
        ({"ep": 8, "tp": 2, "cp": 2}, 8, 2),
        ({"ep": 2, "dp": 4, "pp": 2}, 8, 4),
    ],
)
def test_layout_counts_its_processes(settings, num_procs, data_parallel) -> None:
    """Expert parallelism takes no processes of its own; without dp there are as many as it needs."""
    layout = LayoutConfig(**settings)
    assert (layout.num_procs, layout.data_parallel) == (num_procs, data_parallel)


def test_place_is_megatron_s() -> None:
    """Every rank's coordinates are those that Megatron's own groups give it."""
    code = """
import json, os
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
import torch.distributed as dist
from megatron.core.parallel_state import RankGenerator
order = "tp-cp-ep-dp-pp"
dense = RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=2, order=order)
expert = RankGenerator(tp=1, ep=4, dp=2, pp=2, cp=1, order=order)
found = {name: dense.get_ranks(name) for name in ("tp", "cp", "dp", "pp")} | {"ep": expert.get_ranks("ep")}
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    groups = json.loads(done.stdout.splitlines()[-1])
    layout = LayoutConfig(tp=2, cp=2, dp=2, pp=2, ep=4)
    for rank in range(layout.num_procs):
        place = dataclasses.asdict(layout.place(rank))
        for name, of_name in groups.items():
            group = next(ranks for ranks in of_name if rank in ranks)
            assert place[f"{name}_rank"] == group.index(rank), (rank, name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 0}, "actor.layout.tp: must be at least 1, got 0"),
        (
            {"dp": 0},
            "actor.layout.dp: must be at least 1, or absent for as few as ep needs, got 0",
        ),
        (
            {"dp": 3, "ep": 2},
            "actor.layout.ep: must divide tp * cp * dp = 3, the ranks of a stage, got 2",
        ),
    ],
)
def test_layout_refuses_what_cannot_be(settings, message) -> None:
    """The key, the rule and the value are said."""
    with pytest.raises(ConfigError) as caught:
        LayoutConfig(**settings)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"tp": 4}, {}, r"tp: must divide the model's key/value heads, 2, got 4"),
        ({"tp": 2}, {"dense_width": 47}, r"tp: must divide the model's dense feed-forward width, 47, got 2"),
        ({"ep": 2}, {"num_experts": 5}, r"ep: must divide the model's experts, 5, got 2"),
        ({"ep": 2}, {"num_experts": None}, r"ep: must be 1 for a model without experts, got 2"),
        (
            {"tp": 2, "sequence_parallel": False},
            {},
            r"sequence_parallel: must be true with tp=2 for a mixture of experts, got false; else every tensor",
        ),
        ({"pp": 4}, {}, r"pp: must be at most the model's 3 layers, got 4"),
        (
            {"pp": 3},
            {},
            r"the first stage must have the 2 layers that add visual features, got 1 of 3 layers with pp=3",
        ),
        (
            {"pp": 2},
            {"tied": True},
            r"pp: must be 1 for a model whose embedding is also its output matrix, got 2",
        ),
    ],
)
def test_check_layout_says_why_a_model_cannot_be_cut(settings, changes, message) -> None:
    """Each combination that would fail, or train something else, is refused before anything starts."""
    with pytest.raises(ConfigError, match=message):
        check_layout(LayoutConfig(**settings), dataclasses.replace(SIZES, **changes))


def test_check_layout_lets_a_dense_model_go_without_sequence_parallel() -> None:
    """Only experts need it."""
    check_layout(LayoutConfig(tp=2, sequence_parallel=False), dataclasses.replace(SIZES, num_experts=None))


def test_stage_layers_put_the_rest_on_the_first_stage() -> None:
    """All layers are on one stage each, and later stages have equally many."""
    assert LayoutConfig(pp=2).stage_layers(3) == [2, 1]
    assert LayoutConfig(pp=4).stage_layers(11) == [5, 2, 2, 2]
    assert LayoutConfig().stage_layers(7) == [7]


@pytest.mark.parametrize(("ranks", "length"), [(1, 5), (2, 8), (4, 24)])
def test_local_tokens_share_out_the_causal_triangle(ranks, length) -> None:
    """Each token is on one rank, and all ranks have as many pairs of tokens to attend to."""
    shares = [local_tokens(length, ranks, rank) for rank in range(ranks)]
    assert sorted(torch.cat(shares).tolist()) == list(range(length))
    work = [int((share + 1).sum()) for share in shares]
    assert max(work) == min(work)


def test_start_parallel_refuses_ranks_without_a_meeting_point(monkeypatch) -> None:
    """Another layout than this process's, and a missing environment, are said before anything waits."""
    start_parallel(0)
    with pytest.raises(TrainingError, match=r"layout must be that of this process's other trainers"):
        start_parallel(0, LayoutConfig(dp=2))
