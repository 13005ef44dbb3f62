"""Every shipped algorithm through the trainer: cut batches, a critic, scores of the whole batch, checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.sections import CorrectionConfig, CriticConfig
from relax.config import PRESETS, load_config
from relax.errors import TrainingError
from relax.train.config import TrainerConfig
from relax.train.trainer import CRITIC_FILE, Trainer

NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))


def preset(name: str, *words: str) -> AlgorithmConfig:
    """Return a shipped algorithm with a penalty and an entropy bonus."""
    words = (f"algorithm={name}", "algorithm.kl_coef=0.05", "algorithm.entropy_coef=0.01", *words)
    return load_config([], words).algorithm


def near(batch, trainer: Trainer):
    """Return the batch with rollout logprobs as a slightly older policy would have given them."""
    rng = np.random.default_rng(0)
    seen = trainer.train_step(batch).trainer_logprobs
    logprobs = [(row + rng.normal(0, 0.1, len(row))).astype(np.float32) for row in seen]
    return type(batch)(**batch.__dict__ | {"rollout_logprobs": logprobs})


def make_trainer(model_dir: Path, algorithm: AlgorithmConfig, **settings) -> Trainer:
    """A trainer without replay, from a fixed seed."""
    return Trainer(model_dir, TrainerConfig(**({"routing_replay": False} | settings)), algorithm, seed=0)


def gradients(trainer: Trainer, batch) -> dict[str, torch.Tensor]:
    """Return the gradients of a step, the critic's included."""
    seen: dict[str, torch.Tensor] = {}

    def keep(optimizer, arguments, keywords) -> None:
        seen.update({name: p.grad.clone() for name, p in trainer.policy.named_parameters()})
        if trainer.critic is not None:
            seen.update({name: p.grad.clone() for name, p in trainer.critic.named_parameters()})

    handle = trainer.optimizer.register_step_pre_hook(keep)
    trainer.train_step(batch)
    handle.remove()
    return seen


@pytest.fixture(scope="module")
def batch(thinker_dir, make_batch):
    """A batch whose rollouts are a little off-policy."""
    made = make_batch(num_groups=3)
    return near(made, make_trainer(thinker_dir, AlgorithmConfig()))


@pytest.mark.parametrize("name", NAMES)
def test_algorithm_has_the_same_gradients_however_the_batch_is_cut(name, thinker_dir, batch) -> None:
    """One micro-batch, or one for each row: normalisers, whitening, baselines and bounds are those of the batch."""
    algorithm = preset(name)
    whole = gradients(make_trainer(thinker_dir, algorithm), batch)
    cut = gradients(
        make_trainer(thinker_dir, algorithm, share_prompts=False, max_tokens_per_micro_batch=1), batch
    )
    assert whole.keys() == cut.keys()
    assert max(float(gradient.abs().max()) for gradient in whole.values()) > 1e-3
    assert {
        n: float((whole[n] - cut[n]).abs().max()) for n in whole if (whole[n] - cut[n]).abs().max() > 5e-6
    } == {}


def test_critic_learns_and_leaves_the_policy_s_gradient_alone(thinker_dir, batch) -> None:
    """By default no weight of the value loss changes what the policy gets; with `trunk_gradient` it does."""
    made = {
        (coef, trunk): gradients(
            make_trainer(
                thinker_dir,
                AlgorithmConfig(
                    advantage="gae", critic=CriticConfig(value_coef=coef, trunk_gradient=trunk), kl_coef=0.0
                ),
            ),
            batch,
        )
        for coef, trunk in ((0.5, False), (5.0, False), (5.0, True))
    }
    router = next(name for name in made[0.5, False] if name.endswith("router.weight"))
    assert torch.equal(made[0.5, False][router], made[5.0, False][router])
    torch.testing.assert_close(made[5.0, False]["head.weight"], 10 * made[0.5, False]["head.weight"])
    # The head starts at zero, so that nothing passes through it before its first step.
    assert torch.equal(made[5.0, True][router], made[5.0, False][router])
    trainer = make_trainer(
        thinker_dir,
        AlgorithmConfig(advantage="gae", critic=CriticConfig(trunk_gradient=True, value_coef=5.0)),
    )
    trainer.train_step(batch)
    apart = make_trainer(thinker_dir, AlgorithmConfig(advantage="gae", critic=CriticConfig(value_coef=5.0)))
    apart.train_step(batch)
    assert not torch.equal(gradients(trainer, batch)[router], gradients(apart, batch)[router])


def test_critic_s_loss_falls_on_a_batch_that_comes_again(thinker_dir, batch) -> None:
    """And the metrics say how good the values are."""
    trainer = make_trainer(thinker_dir, preset("ppo", "algorithm.critic.lr=0.05"), lr=1e-5, warmup_steps=0)
    metrics = [trainer.train_step(batch).metrics for _ in range(20)]
    assert metrics[-1]["value_loss"] < 0.5 * metrics[0]["value_loss"]
    assert metrics[0]["value_explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[-1]["value_explained_variance"] > 0.2
    assert all(np.isfinite(value) for value in metrics[-1].values())


def test_checkpoint_with_a_critic_goes_on_exactly(thinker_dir, make_batch, tmp_path) -> None:
    """Four steps are two steps, a checkpoint, a fresh trainer and two steps; the head is one safetensors file."""
    batches, algorithm = [make_batch(seed=seed) for seed in range(4)], preset("ppo")
    straight, first = (make_trainer(thinker_dir, algorithm) for _ in range(2))
    for batch in batches:
        expected = straight.train_step(batch)
    for batch in batches[:2]:
        first.train_step(batch)
    first.save_checkpoint(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / CRITIC_FILE).is_file()
    second = make_trainer(thinker_dir, algorithm)
    second.load_checkpoint(tmp_path / "checkpoint")
    for batch in batches[2:]:
        result = second.train_step(batch)
    for key in ("loss", "grad_norm", "value_loss", "critic_grad_norm", "advantage_std"):
        assert result.metrics[key] == expected.metrics[key]


def test_checkpoint_without_a_critic_is_refused_by_a_trainer_with_one(thinker_dir, tmp_path) -> None:
    """The missing file is named."""
    make_trainer(thinker_dir, AlgorithmConfig()).save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(
        TrainingError, match=r"load_checkpoint: .*critic.safetensors must be a safetensors file, got"
    ):
        make_trainer(thinker_dir, preset("ppo")).load_checkpoint(tmp_path / "checkpoint")


def test_second_moment_bound_leaves_out_the_furthest_tokens_of_the_whole_batch(thinker_dir, batch) -> None:
    """The share of tokens left out is what the bound gives by hand."""
    algorithm = AlgorithmConfig(policy_loss="surrogate", correction=CorrectionConfig(m2_budget=0.002))
    result = make_trainer(thinker_dir, algorithm, max_tokens_per_micro_batch=1).train_step(batch)
    trainer, rollout = (np.concatenate(rows) for rows in (result.trainer_logprobs, batch.rollout_logprobs))
    squares = np.sort((trainer - rollout) ** 2)
    num_kept = int((np.cumsum(squares) / np.arange(1, len(squares) + 1) <= 0.002).sum())
    assert 0 < num_kept < len(squares)
    assert result.metrics["correction_zero_fraction"] == pytest.approx(1 - num_kept / len(squares))
