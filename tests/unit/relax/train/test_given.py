"""Scores that others have computed, in place of the trainer's own: the same step, to the last digits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relax.config import load_config
from relax.errors import TrainingError
from relax.train.batch import TrainBatch
from relax.train.config import TrainerConfig
from relax.train.given import GivenScores
from relax.train.group_credit import GroupOutcome, group_credit
from relax.train.row_scorer import RowScorer
from relax.train.trainer import Trainer
from relax.train.value_learner import ValueLearner

STEPS = 3
CONFIG = TrainerConfig(warmup_steps=0, lr=3e-3, routing_replay=False)


def batches(make_batch) -> list[TrainBatch]:
    """Return a batch for each step."""
    return [make_batch(seed=step) for step in range(STEPS)]


def algorithm_of(*words: str):
    """Return an algorithm by the words of a command line."""
    return load_config([], list(words)).algorithm


def assert_same_weights(trainer: Trainer, other: Trainer) -> None:
    """Fail unless two trainers hold the same weights but for rounding."""
    ours, theirs = trainer.policy.state_dict(), other.policy.state_dict()
    for name, tensor in ours.items():
        if hasattr(tensor, "shape"):
            np.testing.assert_allclose(tensor.numpy(), theirs[name].numpy(), atol=1e-6, err_msg=name)


def assert_same_metrics(
    left: dict[str, float], right: dict[str, float], *, but: tuple[str, ...] = ()
) -> None:
    """Fail unless what both have is equal but for rounding; times do not count."""
    names = [name for name in left if not name.endswith("_s") and name not in but]
    assert set(names) <= set(right)
    for name in names:
        assert left[name] == pytest.approx(right[name], rel=1e-4, abs=1e-6), name


def test_given_reference_logprobs_make_the_same_steps(thinker_dir: Path, make_batch):
    """A scorer with the first weights stands in for the trainer's own reference, which is not loaded."""
    algorithm = algorithm_of("algorithm.kl_coef=0.3")
    folded = Trainer(thinker_dir, CONFIG, algorithm, seed=0)
    served = Trainer(thinker_dir, CONFIG, algorithm, seed=0, services=("reference",))
    reference = RowScorer(thinker_dir, CONFIG, algorithm, seed=0, replays_routing=False)
    assert served._reference is None
    for batch in batches(make_batch):
        given = GivenScores(ref_logprobs=reference.score(batch).logprobs)
        seen = folded.train_step(batch), served.train_step(replace(batch, given=given))
        assert_same_metrics(seen[0].metrics, seen[1].metrics)
    assert seen[0].metrics["kl_reference_nats"] > 1e-6
    assert_same_weights(folded, served)


@pytest.mark.parametrize("name", ["decoupled", "icepop", "m2po"])
def test_given_proximal_logprobs_make_the_same_steps(thinker_dir: Path, make_batch, tmp_path, name):
    """A scorer that adopts each version's snapshot sees what the trainer sees before its step."""
    algorithm = algorithm_of(f"algorithm={name}")
    folded, served = (Trainer(thinker_dir, CONFIG, algorithm, seed=0) for _ in range(2))
    scorer = RowScorer(thinker_dir, CONFIG, algorithm, seed=0, replays_routing=False)
    for step, batch in enumerate(batches(make_batch)):
        served.publish(tmp_path / str(step), step)
        assert scorer.adopt(tmp_path / str(step)) == scorer.policy_version == step
        given = GivenScores(proximal_logprobs=scorer.score(batch).logprobs)
        seen = folded.train_step(batch), served.train_step(replace(batch, given=given))
        assert_same_metrics(seen[0].metrics, seen[1].metrics)
    assert_same_weights(folded, served)


def test_given_proximal_logprobs_are_what_the_loss_looks_at(thinker_dir: Path, make_batch):
    """Others make another step: the column is not merely carried along."""
    algorithm, batch = algorithm_of("algorithm=decoupled"), make_batch()
    trainer = Trainer(thinker_dir, CONFIG, algorithm, seed=0)
    far = [logprobs - 1.0 for logprobs in batch.rollout_logprobs]
    moved = trainer.train_step(replace(batch, given=GivenScores(proximal_logprobs=far))).metrics
    assert moved["correction_weight"] == pytest.approx(np.exp(-1.0), rel=1e-4)


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo"])
def test_given_advantages_make_the_same_steps(thinker_dir: Path, make_batch, name):
    """To the bit, whether the algorithm whitens over the batch or not, groups in any order and in parts."""
    algorithm = algorithm_of(f"algorithm={name}")
    folded, served = (Trainer(thinker_dir, CONFIG, algorithm, seed=0) for _ in range(2))
    for batch in batches(make_batch):
        raw: dict[int, np.ndarray] = {}
        for groups in ((2, 0), (3, 1)):
            rows = [row for group in groups for row in np.flatnonzero(batch.groups == group).tolist()]
            outcome = GroupOutcome(
                group_ids=[f"g{batch.groups[row]}" for row in rows],
                rewards=batch.rewards[rows],
                rollout_logprobs=[batch.rollout_logprobs[row] for row in rows],
            )
            raw |= dict(zip(rows, group_credit(outcome, algorithm).advantages, strict=True))
        given = GivenScores(raw_advantages=[raw[row] for row in range(batch.num_rows)])
        seen = folded.train_step(batch), served.train_step(replace(batch, given=given))
        for left, right in zip(seen[0].advantages, seen[1].advantages, strict=True):
            np.testing.assert_array_equal(left, right)


def test_critic_elsewhere_learns_and_values_the_same(thinker_dir: Path, make_batch, tmp_path):
    """Values, returns, the head's metrics and its weights, step after step, and in a checkpoint of either form."""
    algorithm = algorithm_of("algorithm=ppo", "algorithm.critic.lr=0.05")
    folded = Trainer(thinker_dir, CONFIG, algorithm, seed=0)
    served = Trainer(thinker_dir, CONFIG, algorithm, seed=0, services=("critic",))
    assert served.critic is None
    assert folded.critic is not None
    scorer = RowScorer(thinker_dir, CONFIG, algorithm, seed=0, replays_routing=False)
    learner = ValueLearner(scorer, CONFIG, algorithm)
    for step, batch in enumerate(batches(make_batch)):
        given = GivenScores(values=learner.score(batch).values)
        seen = folded.train_step(batch), served.train_step(replace(batch, given=given))
        assert seen[1].returns is not None
        of_head = learner.learn(replace(batch, given=given), seen[1].returns)
        assert_same_metrics(of_head, seen[0].metrics)
        assert_same_metrics(seen[1].metrics, seen[0].metrics, but=("loss",))
        value_part = algorithm.critic.value_coef * of_head["value_loss"]
        assert seen[1].metrics["loss"] + value_part == pytest.approx(seen[0].metrics["loss"], abs=1e-6)
        served.publish(tmp_path / str(step + 1), step + 1)
        assert scorer.adopt(tmp_path / str(step + 1)) == learner.num_steps
    assert abs(of_head["value_mean"]) > 1e-3
    assert_same_weights(folded, served)
    learner.save(tmp_path / "head.safetensors")
    served.save_checkpoint(tmp_path / "checkpoint", tmp_path / "head.safetensors")
    other = Trainer(thinker_dir, CONFIG, algorithm, seed=1)
    other.load_checkpoint(tmp_path / "checkpoint")
    for name, tensor in folded.critic.tensors().items():
        np.testing.assert_allclose(
            other.critic.tensors()[name].numpy(), tensor.numpy(), atol=1e-6, err_msg=name
        )


def test_given_scores_that_do_not_fit_are_refused(thinker_dir: Path, make_batch):
    """By row, column and value, before anything changes."""
    batch = make_batch()
    trainer = Trainer(thinker_dir, CONFIG, algorithm_of(), seed=0)
    short = [row[1:] for row in batch.rollout_logprobs]
    length = len(batch.rollout_logprobs[0])
    with pytest.raises(TrainingError) as caught:
        trainer.train_step(replace(batch, given=GivenScores(values=short)))
    assert str(caught.value) == (
        f"batch row 0: values must be one for each of {length} tokens, got {length - 1}"
    )
    odd = [row.copy() for row in batch.rollout_logprobs]
    odd[2][0] = np.nan
    with pytest.raises(TrainingError) as caught:
        trainer.train_step(replace(batch, given=GivenScores(ref_logprobs=odd)))
    assert str(caught.value) == "batch row 2: ref_logprobs must be finite, got nan at token 0"
    with pytest.raises(TrainingError) as caught:
        trainer.train_step(replace(batch, given=GivenScores(ref_logprobs=odd[1:])))
    assert (
        str(caught.value) == f"batch: ref_logprobs must have {batch.num_rows} rows, got {batch.num_rows - 1}"
    )
