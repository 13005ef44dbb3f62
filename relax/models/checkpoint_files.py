"""The safetensors files of a model directory: which tensor is in which file, reading by name, writing in shards.

model.safetensors                                    one file, or
model-00001-of-00003.safetensors ...                 several, with model.safetensors.index.json
    {"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

ONE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def tensor_files(model_dir: Path | str) -> dict[str, str]:
    """Return the file of each tensor of a model directory, from the files themselves."""
    where = Path(model_dir)
    files: dict[str, str] = {}
    for path in sorted(where.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            files.update(dict.fromkeys(opened.keys(), path.name))
    return files


def read_tensors(model_dir: Path | str, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read tensors by name, all without `names`; mapped, not copied, until they are used."""
    wanted = None if names is None else set(names)
    tensors: dict[str, Tensor] = {}
    by_file: dict[str, list[str]] = {}
    for name, file in tensor_files(model_dir).items():
        if wanted is None or name in wanted:
            by_file.setdefault(file, []).append(name)
    for file, chosen in by_file.items():
        with safe_open(Path(model_dir) / file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in chosen}
    return tensors


def plan_shards(tensors: Mapping[str, Tensor], max_shard_bytes: int) -> dict[str, str]:
    """Return the file for each tensor, in the order given, none over `max_shard_bytes` unless one tensor is."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and held + size > max_shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    if len(shards) == 1:
        return dict.fromkeys(tensors, ONE_FILE)
    total = len(shards)
    return {
        name: f"model-{number:05d}-of-{total:05d}.safetensors"
        for number, names in enumerate(shards, 1)
        for name in names
    }


def write_tensors(directory: Path | str, tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> None:
    """Write tensors into the files named for them, and an index when there are several files."""
    where = Path(directory)
    for file in sorted(set(files.values())):
        chosen = {name: tensors[name].contiguous() for name in files if files[name] == file}
        save_file(chosen, where / file, metadata={"format": "pt"})
    if len(set(files.values())) > 1:
        total = sum(tensors[name].numel() * tensors[name].element_size() for name in files)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        (where / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def is_weights_file(path: Path) -> bool:
    """Whether a file of a model directory holds tensors or says where they are."""
    return path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
