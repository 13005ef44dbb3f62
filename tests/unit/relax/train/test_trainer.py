"""The optimizer step: equal to plain transformers and torch, however the batch is cut, and safe against bad input."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from relax.algorithms.config import AlgorithmConfig
from relax.errors import TrainingError
from relax.models.snapshot import read_snapshot
from relax.train.config import TrainerConfig
from relax.train.trainer import Trainer

ENTROPY = AlgorithmConfig(entropy_coef=0.05, clip_low=0.3, clip_high=2.0)


def make_trainer(model_dir: Path, algorithm: AlgorithmConfig = ENTROPY, **settings) -> Trainer:
    """A trainer without replay unless asked, from a fixed seed."""
    return Trainer(model_dir, TrainerConfig(**({"routing_replay": False} | settings)), algorithm, seed=0)


def gradients(trainer: Trainer, batch) -> dict[str, Tensor]:
    """Return the step's gradients as the optimizer gets them, under checkpoint names."""
    seen: dict[str, Tensor] = {}

    def keep(optimizer, arguments, keywords) -> None:
        seen.update({name: p.grad.clone() for name, p in trainer.policy.named_parameters()})

    handle = trainer.optimizer.register_step_pre_hook(keep)
    trainer.train_step(batch)
    handle.remove()
    return trainer.policy.checkpoint_names(seen)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return a copy of all weights."""
    return {name: tensor.clone() for name, tensor in trainer.policy.checkpoint_tensors().items()}


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    """Same names, and no value further apart than the tolerance."""
    assert left.keys() == right.keys()
    far = {n: float((left[n] - right[n]).abs().max()) for n in left}
    assert {n: d for n, d in far.items() if d > tolerance} == {}


@pytest.mark.parametrize("share_prompts", [True, False])
def test_train_step_gradients_equal_plain_transformers(thinker_dir, make_batch, plain, share_prompts) -> None:
    """Towers and language model get the gradients that transformers and torch give, with and without sharing."""
    batch = make_batch()
    trainer = make_trainer(thinker_dir, max_grad_norm=None, share_prompts=share_prompts)
    expected = plain.gradients(batch, ENTROPY)
    got = gradients(trainer, batch)
    assert max(float(g.abs().max()) for n, g in expected.items() if n.startswith("visual.")) > 1e-3
    assert max(float(g.abs().max()) for n, g in expected.items() if n.startswith("audio_tower.")) > 1e-3
    assert_close(got, expected, 1e-5)


def test_train_step_weights_after_three_steps_equal_plain_torch(thinker_dir, make_batch, plain) -> None:
    """Three steps with clipping and warm-up end at the weights of a plain torch loop."""
    trainer = make_trainer(thinker_dir, warmup_steps=2, epsilon=1e-3)
    optimizer = torch.optim.AdamW(
        plain.thinker.hf.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.0
    )
    for step in range(3):
        batch = make_batch(seed=step)
        trainer.train_step(batch)
        optimizer.zero_grad()
        plain.loss(batch, ENTROPY).backward()
        torch.nn.utils.clip_grad_norm_(plain.thinker.hf.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 2)
        optimizer.step()
    batch = make_batch(seed=9)
    got = trainer.train_step(batch).trainer_logprobs
    for ours, theirs in zip(got, plain.logprobs(batch), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_train_step_is_the_same_however_the_batch_is_cut(thinker_dir, make_batch) -> None:
    """One micro-batch or many, shared prompts or not: the same gradients."""
    batch = make_batch(routed=True)
    whole = gradients(make_trainer(thinker_dir, routing_replay=True), batch)
    for settings in (
        {"max_tokens_per_micro_batch": 40},
        {"max_tokens_per_micro_batch": 1},
        {"share_prompts": False, "max_tokens_per_micro_batch": 70},
        {"packing": True},
        {"packing": True, "max_tokens_per_micro_batch": 60},
        {"packing": True, "share_prompts": False},
        {"recompute": True, "max_tokens_per_micro_batch": 60},
    ):
        trainer = make_trainer(thinker_dir, routing_replay=True, **settings)
        assert_close(gradients(trainer, batch), whole, 2e-6)


def test_train_step_returns_what_it_saw(thinker_dir, make_batch) -> None:
    """Advantages, logprobs and ratios come row by row; the metrics are finite and named."""
    batch = make_batch(routed=True)
    result = make_trainer(thinker_dir, routing_replay=True).train_step(batch)
    lengths = [len(tokens) for tokens in batch.completion_token_ids]
    assert [len(values) for values in result.advantages] == lengths
    assert [len(values) for values in result.trainer_logprobs] == lengths
    ratios = [
        np.exp(trainer - rollout).mean()
        for trainer, rollout in zip(result.trainer_logprobs, batch.rollout_logprobs, strict=True)
    ]
    np.testing.assert_allclose(result.importance_ratio, ratios, rtol=1e-4)
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert {
        "loss",
        "entropy_nats",
        "grad_norm",
        "lr",
        "clip_fraction",
        "routing_mismatch",
    } <= result.metrics.keys()
    assert result.metrics["num_steps"] == 1
    assert result.metrics["num_completion_tokens"] == sum(lengths)
    assert 0.3 < result.metrics["routing_mismatch"] < 1


def test_train_step_replays_a_rollout_that_agrees(thinker_dir, make_batch) -> None:
    """On-policy rollouts have ratio one, no mismatch and no KL."""
    batch = make_batch()
    seen = make_trainer(thinker_dir).train_step(batch)
    batch = dataclasses.replace(batch, rollout_logprobs=seen.trainer_logprobs)
    result = make_trainer(thinker_dir).train_step(batch)
    np.testing.assert_allclose(result.importance_ratio, 1.0, atol=1e-6)
    assert result.metrics["kl_rollout_trainer_nats"] == pytest.approx(0, abs=1e-9)
    assert result.metrics["clip_fraction"] == 0


def test_train_step_divides_logits_by_the_temperature(thinker_dir, make_batch, plain) -> None:
    """The logprobs are those of the distribution that was sampled from."""
    batch = dataclasses.replace(make_batch(num_groups=1), temperature=0.5)
    result = make_trainer(thinker_dir).train_step(batch)
    with torch.no_grad():
        log_probs = (plain.row_logits(batch, 0) / 0.5).log_softmax(-1)
    expected = [float(log_probs[i, token]) for i, token in enumerate(batch.completion_token_ids[0])]
    np.testing.assert_allclose(result.trainer_logprobs[0], expected, atol=1e-4)


def test_train_step_refuses_a_nan_logprob_before_anything_changes(thinker_dir, make_batch) -> None:
    """The row and the token are named, and the weights are as they were."""
    batch = make_batch()
    batch.rollout_logprobs[5][0] = np.nan
    trainer = make_trainer(thinker_dir)
    before = weights(trainer)
    with pytest.raises(TrainingError) as caught:
        trainer.train_step(batch)
    assert str(caught.value) == "batch row 5: rollout_logprobs must be finite, got nan at token 0"
    assert_close(weights(trainer), before, 0.0)
    assert trainer.num_steps == 0


def test_train_step_skips_and_counts_a_gradient_that_is_not_finite(thinker_dir, make_batch) -> None:
    """Weights and optimizer stay as they were, the metrics say so, and the next step works."""
    trainer = make_trainer(thinker_dir)
    trainer.train_step(make_batch())
    before, bad = weights(trainer), next(trainer.policy.language_model.parameters())
    handle = bad.register_hook(lambda gradient: gradient * float("inf"))
    result = trainer.train_step(make_batch(seed=1))
    handle.remove()
    assert result.metrics["step_skipped"] == 1
    assert result.metrics["num_skipped_steps"] == 1
    assert (trainer.num_steps, trainer.num_skipped_steps) == (1, 1)
    assert_close(weights(trainer), before, 0.0)
    assert trainer.train_step(make_batch(seed=1)).metrics["step_skipped"] == 0


def test_train_step_that_broke_off_leaves_no_gradient_behind(thinker_dir, make_batch) -> None:
    """After an error in the middle of a step the next step is that of a fresh trainer."""
    trainer, batch = make_trainer(thinker_dir), make_batch()

    def stop(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    handle = trainer.policy.language_model.embedding.word_embeddings.weight.register_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.train_step(batch)
    handle.remove()
    again, fresh = trainer.train_step(batch).metrics, make_trainer(thinker_dir).train_step(batch).metrics
    assert again["grad_norm"] == fresh["grad_norm"]
    assert again["num_steps"] == 1


def test_trainer_freezes_the_towers_when_told(thinker_dir, make_batch) -> None:
    """Only the language model moves."""
    trainer = make_trainer(thinker_dir, freeze_towers=True)
    before = weights(trainer)
    trainer.train_step(make_batch())
    moved = {name for name, tensor in weights(trainer).items() if not torch.equal(tensor, before[name])}
    assert moved
    assert all(name.startswith(("model.", "lm_head.")) for name in moved)


def test_trainer_has_a_learning_rate_for_the_towers(thinker_dir, make_batch) -> None:
    """Both rates are warmed up and reported."""
    trainer = make_trainer(thinker_dir, lr=1e-3, tower_lr=1e-4, warmup_steps=4)
    metrics = trainer.train_step(make_batch()).metrics
    assert (metrics["lr"], metrics["tower_lr"]) == (pytest.approx(2.5e-4), pytest.approx(2.5e-5))


def test_publish_writes_the_directory_s_names(omni_dir, tmp_path) -> None:
    """A snapshot holds every tensor of the model directory, unchanged before the first step."""
    trainer = make_trainer(omni_dir)
    trainer.publish(tmp_path / "000000", 7)
    version, tensors = read_snapshot(tmp_path / "000000")
    assert version == 7
    assert_close(tensors, weights(trainer), 0.0)
