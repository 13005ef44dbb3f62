"""The safetensors files of a model directory: which tensor is in which file, reading by name, the index.

model.safetensors                                    one file, or
model-00001-of-00003.safetensors ...                 several, with model.safetensors.index.json
    {"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import safe_open
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


def file_names(count: int) -> list[str]:
    """Return the names of `count` files of weights."""
    if count == 1:
        return [ONE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_index(directory: Path, files: Mapping[str, str], num_bytes: int) -> None:
    """Write Hugging Face's index, given the file of each tensor."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(files.items()))}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")


def is_weights_file(path: Path) -> bool:
    """Whether a file of a model directory holds tensors or says where they are."""
    return path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
