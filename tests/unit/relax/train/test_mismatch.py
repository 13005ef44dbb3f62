"""How far the trainer is from the policy that rolled out, and what routing replay does about it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from relax.algorithms.config import AlgorithmConfig
from relax.models.spec import ThinkerSpec
from relax.rollout.torch_engine import TorchEngine
from relax.train.batch import TrainBatch
from relax.train.config import TrainerConfig
from relax.train.trainer import Trainer
from tests.kit.rollouts import roll_out
from tests.unit.relax.train.conftest import make_prompt

KINDS = (("image",), ("audio",), ("video",), ())
DIFFERENCES = (
    "logprob_difference_mean_nats",
    "logprob_difference_square_nats2",
    "kl_rollout_trainer_nats",
)


@pytest.fixture(scope="module")
def misrouted(omni_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainBatch:
    """Rollouts of an engine whose routers alone are others: noise of a fifth of their size."""
    directory = tmp_path_factory.mktemp("misrouted") / "model"
    shutil.copytree(omni_dir, directory)
    tensors, generator = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensors[name] = tensor + 0.2 * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    engine, spec, rng = (
        TorchEngine(directory),
        ThinkerSpec.from_pretrained(omni_dir),
        np.random.default_rng(0),
    )
    prompts = [make_prompt(rng, kinds, spec) for kinds in KINDS]
    batch = roll_out(engine, prompts, spec, group_size=4, max_new_tokens=4, seed=0)
    engine.close()
    return batch


def metrics_of(model_dir: Path, batch: TrainBatch, **settings: object) -> dict[str, float]:
    """Return what the first step on the batch sees."""
    config = TrainerConfig(**settings)  # type: ignore[arg-type]
    return Trainer(model_dir, config, AlgorithmConfig(), seed=0).train_step(batch).metrics


def test_replay_brings_the_trainer_closer_to_rollouts_of_other_routers(omni_dir, misrouted) -> None:
    """Mean and square of the logprob difference and k3 are smaller with replay; some experts would be others."""
    replayed = metrics_of(omni_dir, misrouted, routing_replay=True)
    free = metrics_of(omni_dir, misrouted, routing_replay=False)
    assert free["logprob_difference_mean_nats"] > 1e-3
    for name in DIFFERENCES:
        assert replayed[name] < 0.7 * free[name], name
    assert 0.02 < replayed["routing_mismatch"] < 0.5
    assert 0.02 < free["routing_mismatch"] < 0.5


def test_routing_mismatch_without_replay_can_be_left_out(omni_dir, misrouted) -> None:
    """It is not counted when that is turned off, nor where a row came without its experts; with replay always."""
    assert "routing_mismatch" not in metrics_of(
        omni_dir, misrouted, routing_replay=False, routing_metrics=False
    )
    assert "routing_mismatch" in metrics_of(omni_dir, misrouted, routing_metrics=False)
    unreported = [None, *misrouted.routed_experts[1:]]
    partly = TrainBatch(**{**misrouted.__dict__, "routed_experts": unreported})
    assert "routing_mismatch" not in metrics_of(omni_dir, partly, routing_replay=False)
