"""Families of models under tensor parallelism: the numbers of one process, though the vocabulary cannot be halved."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from relax.models.spec import ThinkerSpec
from tests.kit.families import make_family
from tests.kit.trainer_ranks import Job, read_seen, run_ranks
from tests.loopback.test_trainer_layouts import assert_same, on_one_process, run_alone

pytestmark = pytest.mark.slow

KINDS: dict[str, list[list[str]]] = {"qwen3": [[]], "qwen3_vl_moe": [["image", "video"], ["video"], []]}
"""Plain text with biasless dense layers; and stacked experts under deepstack, with routing replay."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """A job of two ranks for each family; the dense one saves a checkpoint and goes on from it."""
    home = tmp_path_factory.mktemp("families")
    return {
        name: Job(
            name=f"{name}-tp2",
            model_dir=str(make_family(home / name, name)),
            layout={"tp": 2},
            settings={"routing_replay": "moe" in name},
            batch={"kinds": kinds, "routed": "moe" in name},
            resume=name == "qwen3",
        )
        for name, kinds in KINDS.items()
    }


@pytest.fixture(scope="module")
def out_dir(jobs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the jobs of two ranks have left what they saw."""
    out_dir = tmp_path_factory.mktemp("seen")
    run_alone(dataclasses.replace(jobs["qwen3"], name="one-saved", layout={}, resume=True), out_dir)
    from_one = dataclasses.replace(jobs["qwen3"], name="from-one", resume=False, resume_from="one-saved")
    run_ranks(2, [*jobs.values(), from_one], out_dir)
    return out_dir


@pytest.mark.parametrize("name", KINDS)
def test_tensor_parallel_family_equals_one_process(jobs, out_dir, name) -> None:
    """Losses, gradient norms, logprobs and weights after three steps; no row of padding is in the weights."""
    job = jobs[name]
    assert ThinkerSpec.from_pretrained(job.model_dir).vocab_size % 2 == 1
    assert_same(read_seen(job.name, out_dir), on_one_process(job, out_dir))


def test_padded_vocabulary_goes_on_at_another_layout(jobs, out_dir) -> None:
    """Two ranks from the checkpoint of one, and one from that of two: rows of padding are no part of either."""
    job = jobs["qwen3"]
    expected = on_one_process(job, out_dir)
    assert_same(read_seen("from-one", out_dir), expected)
    one = dataclasses.replace(job, name="from-two", layout={}, resume=False, resume_from=job.name)
    assert_same(run_alone(one, out_dir), expected)
