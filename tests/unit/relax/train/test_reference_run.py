"""Ten update steps of the trainer are those of plain transformers and torch, given the same recorded rollouts.

The rollouts are of the start of training, so that by the last step ratios are clipped, the penalty acts and routers
would choose other experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from relax.config import RunConfig, load_config
from relax.models.spec import ThinkerSpec
from relax.rollout.torch_engine import TorchEngine
from relax.train.batch import TrainBatch
from relax.train.trainer import Trainer
from tests.kit.plain_grpo import PlainGrpo
from tests.kit.rollouts import plain_samples, plain_settings, roll_out
from tests.unit.relax.train.conftest import make_prompt

CONFIG = Path(__file__).parents[4] / "conf" / "omni_grpo.yaml"
KINDS = (("image",), ("audio",), ("video",), ("image", "audio", "video"), ("audio", "image"), ())
NUM_STEPS, GROUP_SIZE, MAX_NEW_TOKENS = 10, 4, 4
TOLERANCE = 1e-5
"""Of losses, gradient norms (relative), logprobs (relative above 1 nat) and weights."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """How far one step of ours is from the same step in plain torch, what ours saw, and its weights after it."""

    distance: dict[str, float]
    metrics: dict[str, float]
    weights: dict[str, Tensor]

    @property
    def equal(self) -> bool:
        return max(self.distance.values()) <= TOLERANCE


@pytest.fixture(scope="module")
def config() -> RunConfig:
    """That of the main job."""
    return load_config([CONFIG], [])


@pytest.fixture(scope="module")
def recorded(omni_dir: Path) -> list[TrainBatch]:
    """Ten batches of all modalities that the embedded engine rolled out under the first weights."""
    engine, spec, rng = TorchEngine(omni_dir), ThinkerSpec.from_pretrained(omni_dir), np.random.default_rng(0)
    batches = []
    for step in range(NUM_STEPS):
        prompts = [make_prompt(rng, kinds, spec) for kinds in KINDS]
        size = {"group_size": GROUP_SIZE, "max_new_tokens": MAX_NEW_TOKENS}
        batches.append(roll_out(engine, prompts, spec, seed=step, **size))
    engine.close()
    return batches


def make_trainer(model_dir: Path, config: RunConfig, *, replay: bool) -> Trainer:
    """Return our trainer as the main job has it, with or without replay."""
    actor = dataclasses.replace(config.actor, routing_replay=replay)
    return Trainer(model_dir, actor, config.algorithm, seed=0)


def side_by_side(trainer: Trainer, plain: PlainGrpo, batches: list[TrainBatch]) -> Iterator[Compared]:
    """Train both on each batch and yield how far apart they are."""
    for batch in batches:
        ours, theirs = trainer.train_step(batch), plain.step(plain_samples(batch))
        our_weights = {name: each.clone() for name, each in trainer.policy.checkpoint_tensors().items()}
        their_weights = plain.weights()
        assert our_weights.keys() == their_weights.keys()
        logprobs = zip(ours.trainer_logprobs, theirs.logprobs, strict=True)
        distance = {
            "loss": abs(ours.metrics["loss"] - theirs.loss),
            "grad_norm": abs(ours.metrics["grad_norm"] / theirs.grad_norm - 1),
            "logprobs": max(float(_relative(left, right).max()) for left, right in logprobs),
            "weights": max(float((w - their_weights[name]).abs().max()) for name, w in our_weights.items()),
        }
        yield Compared(distance, ours.metrics, our_weights)


def _relative(values: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return distances, relative where the expected value is above 1."""
    return np.abs(values - expected) / np.maximum(1.0, np.abs(expected))


@pytest.mark.parametrize("replay", [True, False])
def test_ten_steps_equal_plain_transformers_and_torch(omni_dir, recorded, config, replay) -> None:
    """Losses, gradient norms, logprobs and all weights after every step, with and without routing replay."""
    trainer = make_trainer(omni_dir, config, replay=replay)
    plain = PlainGrpo(omni_dir, plain_settings(config, replay=replay))
    before = {name: each.clone() for name, each in plain.weights().items()}
    steps = list(side_by_side(trainer, plain, recorded))
    assert {number: step.distance for number, step in enumerate(steps) if not step.equal} == {}
    last = steps[-1]
    assert last.metrics["clip_fraction"] > 0.1
    assert last.metrics["kl_reference_nats"] > 0.02
    assert last.metrics["grad_norm"] > config.actor.max_grad_norm
    assert last.metrics["routing_mismatch"] > 0.05
    moved = {name: float((each - before[name]).abs().max()) for name, each in last.weights.items()}
    for part in ("embed_tokens", "lm_head", "mlp.gate.", "experts.3.", "visual.", "audio_tower."):
        assert max(far for name, far in moved.items() if part in name) > 100 * TOLERANCE, part


@pytest.mark.parametrize(
    "change",
    [
        lambda settings: {"lr": 1.01 * settings.lr},
        lambda settings: {"kl_coef": 1.01 * settings.kl_coef},
        lambda settings: {"clip_high": 1.01 * settings.clip_high},
        lambda settings: {"replay": False},
    ],
    ids=["lr", "kl_coef", "clip_high", "replay"],
)
def test_steps_differ_when_a_number_does(omni_dir, recorded, config, change) -> None:
    """One per cent of a coefficient, or a reference without replay, is seen: the equality above can fail."""
    settings = plain_settings(config, replay=True)
    plain = PlainGrpo(omni_dir, dataclasses.replace(settings, **change(settings)))
    trainer = make_trainer(omni_dir, config, replay=True)
    assert any(not step.equal for step in side_by_side(trainer, plain, recorded))
