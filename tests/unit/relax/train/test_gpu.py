"""The same trainer on a GPU; skipped where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from relax.algorithms.config import AlgorithmConfig
from relax.train.config import TrainerConfig
from relax.train.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


@pytest.mark.parametrize("packing", [False, True])
def test_trainer_on_a_gpu_scores_as_transformers_on_the_cpu(thinker_dir, make_batch, plain, packing) -> None:
    """Weights and activations are on the device, and logprobs are those of the CPU."""
    config = TrainerConfig(routing_replay=False, packing=packing)
    trainer, batch = Trainer(thinker_dir, config, AlgorithmConfig(), seed=0), make_batch()
    result = trainer.train_step(batch)
    assert {parameter.device.type for parameter in trainer.policy.parameters()} == {"cuda"}
    assert result.metrics["step_skipped"] == 0
    for ours, theirs in zip(result.trainer_logprobs, plain.logprobs(batch), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_trainer_on_a_gpu_trains_in_bf16_with_recompute(thinker_dir, make_batch) -> None:
    """A step with replay, recompute and fp32 masters changes the weights."""
    config = TrainerConfig(dtype="bf16", recompute=True, warmup_steps=0, lr=1e-2)
    trainer = Trainer(thinker_dir, config, AlgorithmConfig(), seed=0)
    losses = [trainer.train_step(make_batch(routed=True)).metrics for _ in range(2)]
    assert [metrics["step_skipped"] for metrics in losses] == [0, 0]
    assert losses[0]["loss"] != losses[1]["loss"]
