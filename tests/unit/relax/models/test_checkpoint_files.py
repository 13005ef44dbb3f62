"""Files of a model directory: shards by size, an index where there are several, reading by name."""

from __future__ import annotations

import json

import torch

from relax.models.checkpoint_files import plan_shards, read_tensors, tensor_files, write_tensors

TENSORS = {name: torch.full((10,), float(number)) for number, name in enumerate("abcde")}


def test_plan_shards_fills_each_file_up_to_the_limit() -> None:
    """In the order given; a tensor larger than the limit has a file of its own; one file has the plain name."""
    assert plan_shards(TENSORS, 80) == {
        "a": "model-00001-of-00003.safetensors",
        "b": "model-00001-of-00003.safetensors",
        "c": "model-00002-of-00003.safetensors",
        "d": "model-00002-of-00003.safetensors",
        "e": "model-00003-of-00003.safetensors",
    }
    assert len(set(plan_shards(TENSORS, 1).values())) == 5
    assert set(plan_shards(TENSORS, 1 << 30).values()) == {"model.safetensors"}


def test_written_shards_are_read_by_name(tmp_path) -> None:
    """All or some; the index has every tensor and the bytes of all."""
    files = plan_shards(TENSORS, 80)
    write_tensors(tmp_path, TENSORS, files)
    assert tensor_files(tmp_path) == files
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 200}, "weight_map": files}
    read = read_tensors(tmp_path, ["b", "e"])
    assert {name: tensor[0].item() for name, tensor in read.items()} == {"b": 1.0, "e": 4.0}
    assert read_tensors(tmp_path).keys() == TENSORS.keys()


def test_one_file_has_no_index(tmp_path) -> None:
    """As transformers writes it."""
    write_tensors(tmp_path, TENSORS, plan_shards(TENSORS, 1 << 30))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
