"""Checkpoints: exact resume, whole or absent; and Hugging Face directories that transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from relax.algorithms.config import AlgorithmConfig
from relax.errors import TrainingError
from relax.models.batch import hf_inputs
from relax.models.thinker import collate, load_thinker
from relax.train.config import TrainerConfig
from relax.train.trainer import Trainer

CONFIG = TrainerConfig(warmup_steps=4, lr_decay="cosine", decay_steps=20, weight_decay=0.1)


def make_trainer(model_dir: Path, seed: int = 0, config: TrainerConfig = CONFIG) -> Trainer:
    """A trainer with a schedule and weight decay, so that a lost step count would show."""
    return Trainer(model_dir, config, AlgorithmConfig(entropy_coef=0.01), seed=seed)


def test_load_checkpoint_goes_on_exactly(thinker_dir, make_batch, tmp_path) -> None:
    """Five steps are bit for bit three steps, a checkpoint, a fresh trainer, and two steps."""
    batches = [make_batch(seed=seed, routed=True) for seed in range(5)]
    straight, first = make_trainer(thinker_dir), make_trainer(thinker_dir)
    for batch in batches:
        straight_result = straight.train_step(batch)
    expected_noise = torch.rand(3)
    torch.manual_seed(0)
    for batch in batches[:3]:
        first.train_step(batch)
    first.save_checkpoint(tmp_path / "checkpoint")
    second = make_trainer(thinker_dir, seed=99)
    second.load_checkpoint(tmp_path / "checkpoint")
    assert second.num_steps == 3
    for batch in batches[3:]:
        result = second.train_step(batch)
    for name, tensor in straight.policy.checkpoint_tensors().items():
        assert torch.equal(tensor, second.policy.checkpoint_tensors()[name]), name
    for key in ("loss", "grad_norm", "lr", "num_steps"):
        assert result.metrics[key] == straight_result.metrics[key]
    assert torch.equal(torch.rand(3), expected_noise)


def test_load_checkpoint_works_before_the_first_step(thinker_dir, make_batch, tmp_path) -> None:
    """A checkpoint without optimizer moments resumes as a fresh trainer would start."""
    fresh = make_trainer(thinker_dir)
    fresh.save_checkpoint(tmp_path / "zero")
    loaded = make_trainer(thinker_dir)
    loaded.train_step(make_batch(routed=True))
    loaded.load_checkpoint(tmp_path / "zero")
    ours, theirs = (t.train_step(make_batch(seed=3, routed=True)).metrics for t in (loaded, fresh))
    assert ours["loss"] == theirs["loss"]
    for name, tensor in fresh.policy.checkpoint_tensors().items():
        assert torch.equal(tensor, loaded.policy.checkpoint_tensors()[name]), name


def test_save_checkpoint_with_frozen_towers_resumes(thinker_dir, make_batch, tmp_path) -> None:
    """Parameters without optimizer state are kept too."""
    config = TrainerConfig(freeze_towers=True)
    trainer = make_trainer(thinker_dir, config=config)
    trainer.train_step(make_batch(routed=True))
    trainer.save_checkpoint(tmp_path / "frozen")
    other = make_trainer(thinker_dir, config=config)
    other.load_checkpoint(tmp_path / "frozen")
    for name, tensor in trainer.policy.checkpoint_tensors().items():
        assert torch.equal(tensor, other.policy.checkpoint_tensors()[name]), name


def test_save_checkpoint_replaces_an_older_one_and_leaves_nothing_beside_it(
    thinker_dir, make_batch, tmp_path
) -> None:
    """The directory is the newest whole checkpoint, and no partial directory remains."""
    trainer = make_trainer(thinker_dir)
    trainer.save_checkpoint(tmp_path / "last")
    trainer.train_step(make_batch(routed=True))
    trainer.save_checkpoint(tmp_path / "last")
    assert [path.name for path in tmp_path.iterdir()] == ["last"]
    assert json.loads((tmp_path / "last" / "trainer.json").read_text())["counts"]["num_steps"] == 1


def test_checkpoint_in_background_is_of_the_moment_when_it_was_begun(
    thinker_dir, make_batch, tmp_path
) -> None:
    """Steps that are trained while it is written do not touch it; it is named only when it is finished."""
    batches = [make_batch(seed=seed, routed=True) for seed in range(3)]
    trainer = make_trainer(thinker_dir)
    trainer.train_step(batches[0])
    writer = trainer.begin_checkpoint(
        tmp_path / "checkpoint", {"reward": 0.5}, fill=lambda directory: (directory / "more").touch()
    )
    results = [trainer.train_step(batch) for batch in batches[1:]]
    assert not (tmp_path / "checkpoint").exists()
    writer.finish(60.0)
    assert writer.is_written
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    told = json.loads((tmp_path / "checkpoint" / "trainer.json").read_text())
    assert (told["reward"], told["counts"]["num_steps"]) == (0.5, 1)
    assert (tmp_path / "checkpoint" / "more").is_file()
    again = make_trainer(thinker_dir, seed=5)
    again.load_checkpoint(tmp_path / "checkpoint")
    for batch, expected in zip(batches[1:], results, strict=True):
        assert again.train_step(batch).metrics["loss"] == expected.metrics["loss"]
    for name, tensor in trainer.policy.checkpoint_tensors().items():
        assert torch.equal(tensor, again.policy.checkpoint_tensors()[name]), name


def test_checkpoint_that_cannot_be_written_is_not_there(thinker_dir, tmp_path) -> None:
    """What went wrong is said by `finish`, also when it went wrong in the background; an older one stays."""
    trainer = make_trainer(thinker_dir)
    trainer.save_checkpoint(tmp_path / "last")

    def fail(directory: Path) -> None:
        raise OSError("no space left")

    with pytest.raises(
        TrainingError, match=r"^save_checkpoint: .*partial must be written, got no space left$"
    ):
        trainer.begin_checkpoint(tmp_path / "last", fill=fail).finish(60.0)
    given_up = trainer.begin_checkpoint(tmp_path / "other")
    given_up.give_up()
    given_up.give_up()
    assert [path.name for path in tmp_path.iterdir()] == ["last"]
    make_trainer(thinker_dir).load_checkpoint(tmp_path / "last")


def test_load_checkpoint_refuses_what_is_not_one(thinker_dir, omni_dir, tmp_path) -> None:
    """A missing directory and another model's checkpoint are refused, and nothing is changed."""
    trainer = make_trainer(thinker_dir)
    with pytest.raises(
        TrainingError, match=r"load_checkpoint: .*absent.* must be a checkpoint's description"
    ):
        trainer.load_checkpoint(tmp_path / "absent")
    make_trainer(omni_dir).save_checkpoint(tmp_path / "other")
    with pytest.raises(
        TrainingError, match=r"load_checkpoint: .* must be of a model of \d+ parameters, got \d+"
    ):
        trainer.load_checkpoint(tmp_path / "other")


def test_save_pretrained_loads_in_transformers_with_the_same_logits(
    thinker_dir, make_batch, tmp_path
) -> None:
    """After training, transformers on the saved directory scores as the trainer does."""
    config = TrainerConfig(lr=1e-2, warmup_steps=0, routing_replay=False)
    trainer, batch = make_trainer(thinker_dir, config=config), make_batch()
    before = trainer.train_step(batch)
    trainer.save_pretrained(tmp_path / "hf")
    after = trainer.train_step(batch)
    thinker = load_thinker(tmp_path / "hf")
    prompt = batch.prompts[0]
    with torch.no_grad():
        logits = thinker.hf(**hf_inputs(collate([prompt], thinker.spec), thinker.spec)).logits[0, -1]
    token = int(batch.completion_token_ids[0][0])
    scored = float(logits.log_softmax(-1)[token])
    assert scored == pytest.approx(float(after.trainer_logprobs[0][0]), abs=1e-4)
    assert abs(scored - float(before.trainer_logprobs[0][0])) > 1e-2


def test_save_pretrained_keeps_the_other_files(omni_dir, tmp_path) -> None:
    """Tokenizer, templates and configuration are those of the model directory, and the weights are unchanged."""
    make_trainer(omni_dir).save_pretrained(tmp_path / "hf")
    assert {p.name for p in (tmp_path / "hf").iterdir()} == {p.name for p in omni_dir.iterdir()}
    for path in omni_dir.iterdir():
        if path.suffix != ".safetensors":
            assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.decode(tokenizer.encode("red")) == "red"
    ours, theirs = load_thinker(tmp_path / "hf").hf.state_dict(), load_thinker(omni_dir).hf.state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_trainer_reads_a_sharded_directory(thinker_dir, tmp_path) -> None:
    """A directory with several safetensors files, whose weights come out whole."""
    sharded = tmp_path / "sharded"
    load_thinker(thinker_dir).hf.save_pretrained(sharded, max_shard_size="100KB")
    shutil.copy(thinker_dir / "preprocessor_config.json", sharded)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    make_trainer(sharded).save_pretrained(tmp_path / "again")
    assert [path.name for path in (tmp_path / "again").glob("model*")] == ["model.safetensors"]
    ours, theirs = load_thinker(tmp_path / "again").hf, load_thinker(thinker_dir).hf
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_array_equal(left.detach(), right.detach())
