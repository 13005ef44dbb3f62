"""A Hugging Face directory out of a weight snapshot: its weights, and every other file of the model directory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from relax.durable import whole_or_absent
from relax.models.checkpoint_files import (
    file_names,
    is_weights_file,
    read_tensors,
    tensor_files,
    write_index,
)
from relax.models.snapshot import copy_weights


def export_pretrained(directory: Path, model_dir: Path, snapshot: Path) -> None:
    """Write the directory, whole or not at all; an older one of that name is replaced. Blocks until it is on the disk.

    Weights are hard links to the snapshot's where the file system allows; they lie in its files, not in the model's.
    Tensors of further models, which a snapshot lacks, are those of the model directory.

    Raises:
        SnapshotError: there is no such snapshot.
    """
    with whole_or_absent(directory) as partial:
        fill_pretrained(partial, model_dir, snapshot)


def fill_pretrained(directory: Path, model_dir: Path, snapshot: Path) -> None:
    """Put what `export_pretrained` writes into a directory that exists."""
    copy_weights(snapshot, directory)
    foreign = tensor_files(model_dir).keys() - tensor_files(directory).keys()
    if foreign:
        _add_weights(directory, read_tensors(model_dir, foreign))
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and not is_weights_file(path):
            shutil.copyfile(path, directory / path.name)


def _add_weights(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Add a file of tensors of further models, such as a talker, to the weights that are there."""
    present = sorted(directory.glob("*.safetensors"))
    *names, last = file_names(len(present) + 1)
    for path, name in zip(present, names, strict=True):
        path.rename(directory / name)
    save_file(dict(tensors), directory / last, metadata={"format": "pt"})
    num_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    write_index(directory, tensor_files(directory), num_bytes)
