"""The trainer and the embedded engine speak of the same policy: logprobs, routing, snapshots, temperature."""

from __future__ import annotations

import numpy as np
import pytest

from relax.algorithms.config import AlgorithmConfig
from relax.rollout.engine import GenerateRequest
from relax.rollout.torch_engine import TorchEngine
from relax.train.batch import TrainBatch
from relax.train.config import TrainerConfig
from relax.train.trainer import Trainer

GROUP_SIZE = 4


def roll_out(engine: TorchEngine, prompts, temperature: float) -> TrainBatch:
    """Sample groups and score them by how small their tokens' ids are."""
    requests = [
        GenerateRequest(
            uid=str(index),
            token_ids=prompt.token_ids,
            media=prompt.media,
            num_samples=GROUP_SIZE,
            seed=index,
            max_new_tokens=4,
            temperature=temperature,
        )
        for index, prompt in enumerate(prompts)
    ]
    completions = engine.generate(requests)
    return TrainBatch(
        prompts=prompts,
        groups=np.array([int(completion.uid) for completion in completions], np.int32),
        completion_token_ids=[completion.token_ids for completion in completions],
        rollout_logprobs=[completion.logprobs for completion in completions],
        routed_experts=[completion.routed_experts for completion in completions],
        rewards=np.array([(c.token_ids < 250).mean() for c in completions], np.float32),
        temperature=temperature,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollouts_of_the_published_weights_are_on_policy(
    omni_dir, omni_prompts, tmp_path, temperature
) -> None:
    """Before and after a step, what the engine sampled is what the trainer computes, experts included."""
    engine = TorchEngine(omni_dir, num_threads=1)
    trainer = Trainer(omni_dir, TrainerConfig(lr=1e-2, warmup_steps=0), AlgorithmConfig(), seed=0)
    for step in range(3):
        batch = roll_out(engine, omni_prompts, temperature)
        metrics = trainer.train_step(batch).metrics
        assert metrics["logprob_difference_max_nats"] < 1e-4
        assert metrics["routing_mismatch"] <= 0.002  # a tie between two experts may fall either way
        assert metrics["grad_norm"] > 1e-3
        trainer.publish(tmp_path / str(step), step + 1)
        stale = trainer.train_step(batch).metrics if step == 2 else None
        engine.adopt(tmp_path / str(step), step + 1)
    assert stale is not None
    assert stale["logprob_difference_max_nats"] > 1e-2
    engine.close()
