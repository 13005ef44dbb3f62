"""The weights in buckets: a plan that holds its bound, and the same weights as in one piece."""

from __future__ import annotations

import torch
from safetensors.torch import load

from relax.algorithms.config import AlgorithmConfig
from relax.models.thinker import load_thinker
from relax.train.config import TrainerConfig
from relax.train.export import Parameter, plan_buckets
from relax.train.trainer import Trainer


def test_buckets_hold_their_bound_and_keep_what_is_trained_apart() -> None:
    """In order; a parameter over the bound is alone."""
    sizes = {
        "a": (40, True),
        "fixed": (10, False),
        "b": (70, True),
        "c": (30, True),
        "d": (300, True),
        "e": (1, True),
    }
    parameters = [Parameter(name, size, trained) for name, (size, trained) in sizes.items()]
    buckets = plan_buckets(parameters, 100)
    assert [set(bucket.names) for bucket in buckets] == [{"fixed"}, {"a"}, {"b", "c"}, {"d"}, {"e"}]
    assert [bucket.is_trained for bucket in buckets] == [False, True, True, True, True]
    assert buckets[0].file == "model-00001-of-00005.safetensors"
    assert [bucket.file for bucket in plan_buckets(parameters[:1], 1)] == ["model.safetensors"]


def make_trainer(model_dir, **changes) -> Trainer:
    return Trainer(model_dir, TrainerConfig(warmup_steps=0, **changes), AlgorithmConfig(), seed=0)


def test_weights_in_buckets_are_those_in_one_piece(thinker_dir, make_batch) -> None:
    """After a step, bit for bit; the buffers are as large as the bound allows."""
    trainer = make_trainer(thinker_dir)
    trainer.train_step(make_batch(routed=True))
    found: dict[str, torch.Tensor] = {}
    files = list(trainer.weight_export(50_000).files())
    assert len(files) > 3
    for file in files:
        part = load(file.content.numpy().tobytes())
        assert set(file.tensors) == part.keys()
        assert not part.keys() & found.keys()
        found |= part
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= 50_000
    expected = trainer.policy.checkpoint_tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_frozen_towers_are_gathered_once(thinker_dir) -> None:
    """The second time their files come without content."""
    export = make_trainer(thinker_dir, freeze_towers=True).weight_export()
    first, second = list(export.files()), list(export.files(again=True))
    assert [file.name for file in first] == [file.name for file in second]
    assert [file.content is None for file in second] == [True, False]
    assert any(name.startswith("visual.") for name in first[0].tensors)


def test_directory_of_several_buckets_loads_in_transformers(thinker_dir, tmp_path) -> None:
    """By the index, whose files are not the model directory's; nothing is left beside it."""
    make_trainer(thinker_dir).save_pretrained(tmp_path / "cut", bucket_bytes=50_000)
    assert len(list((tmp_path / "cut").glob("model-*.safetensors"))) > 3
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]
    ours, theirs = load_thinker(tmp_path / "cut").hf, load_thinker(thinker_dir).hf
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(left, right)
