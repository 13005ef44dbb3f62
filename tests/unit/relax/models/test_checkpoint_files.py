"""Files of a model directory: their names, an index where there are several, reading by name."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

from relax.models.checkpoint_files import (
    file_names,
    is_weights_file,
    read_tensors,
    tensor_files,
    write_index,
)

TENSORS = {name: torch.full((10,), float(number)) for number, name in enumerate("abc")}


def test_shards_are_read_by_name(tmp_path) -> None:
    """All or some, each from the file that it is in; the index has every tensor."""
    first, second = file_names(2)
    save_file({"a": TENSORS["a"], "c": TENSORS["c"]}, tmp_path / first)
    save_file({"b": TENSORS["b"]}, tmp_path / second)
    files = {"a": first, "b": second, "c": first}
    assert tensor_files(tmp_path) == files
    write_index(tmp_path, files, 120)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 120}, "weight_map": files}
    read = read_tensors(tmp_path, ["b", "c"])
    assert {name: tensor[0].item() for name, tensor in read.items()} == {"b": 1.0, "c": 2.0}
    assert read_tensors(tmp_path).keys() == TENSORS.keys()
    assert all(is_weights_file(path) for path in tmp_path.iterdir())
    assert not is_weights_file(tmp_path / "config.json")


def test_one_file_has_the_plain_name() -> None:
    """As transformers writes it."""
    assert file_names(1) == ["model.safetensors"]
