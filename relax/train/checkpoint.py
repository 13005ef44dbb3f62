"""Checkpoints of a training run (Megatron's distributed format) and Hugging Face directories.

Layout of a checkpoint: the files of `megatron.core.dist_checkpointing`, and `trainer.json` {format, num_parameters,
counts}. Each kind of directory is written beside its final name and renamed, so it is whole or absent.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from relax.errors import TrainingError
from relax.train.mcore_compat import (
    ShardedTensor,
    ShardedTensorFactory,
    dist_checkpointing,
    make_sharded_optimizer_tensor,
    parallel_state,
)
from relax.train.policy import LANGUAGE_MODEL, OmniPolicy

FORMAT = 1
DESCRIPTION_FILE = "trainer.json"
CHECKPOINT_WARNINGS = (
    (FutureWarning, "`load_state_dict` is deprecated"),
    (FutureWarning, "Please use DTensor instead"),
)
MOMENTS = ("exp_avg", "exp_avg_sq")


def write_checkpoint(
    directory: Path | str,
    policy: OmniPolicy,
    optimizer: torch.optim.Optimizer,
    counts: dict[str, int],
    beside: Mapping[str, dict[str, Tensor]] | None = None,
) -> None:
    """Write weights, optimizer moments, random state and counts; an older checkpoint of that name is replaced.

    Blocks until the files are on disk. `beside` are further safetensors files of the checkpoint, by name.
    """
    with _whole_or_absent(Path(directory)) as partial:
        with _quiet():
            dist_checkpointing.save(_sharded_state(policy, optimizer), str(partial))
        for name, tensors in (beside or {}).items():
            save_file(tensors, partial / name)
        description = {"format": FORMAT, "num_parameters": _num_parameters(policy), "counts": counts}
        (partial / DESCRIPTION_FILE).write_text(json.dumps(description, indent=1) + "\n")


def read_checkpoint(
    directory: Path | str, policy: OmniPolicy, optimizer: torch.optim.Optimizer
) -> dict[str, int]:
    """Load a checkpoint into a policy and its optimizer, restore the random state, and return the counts.

    Raises:
        TrainingError: there is no whole checkpoint, or it is of another model or format.
    """
    where = Path(directory)
    description = _describe(where)
    if description["format"] != FORMAT:
        raise TrainingError(
            f"load_checkpoint: {where} must be of format {FORMAT}, got {description['format']}"
        )
    if description["num_parameters"] != _num_parameters(policy):
        raise TrainingError(
            f"load_checkpoint: {where} must be of a model of {_num_parameters(policy)} parameters, "
            f"got {description['num_parameters']}"
        )
    _create_moments(optimizer, description["counts"]["num_steps"])
    state = _sharded_state(policy, optimizer)
    with _quiet():
        loaded = dist_checkpointing.load(state, str(where))
    with torch.no_grad():
        for name, tensor in _model_tensors(policy).items():
            tensor.copy_(loaded["model"][name])
        trained = _trained(policy, optimizer)
        for moment, values in state["optimizer"].items():
            for name in values:
                optimizer.state[trained[name]][moment].copy_(loaded["optimizer"][moment][name])
    torch.set_rng_state(loaded["rng"]["torch"])
    return description["counts"]


def read_tensors_beside(directory: Path | str, name: str) -> dict[str, Tensor]:
    """Return the tensors of a file that was written `beside` a checkpoint.

    Raises:
        TrainingError: the checkpoint has no such file, or it is not safetensors.
    """
    path = Path(directory) / name
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"load_checkpoint: {path} must be a safetensors file, got {error}") from error


def write_pretrained(
    directory: Path | str, model_dir: Path, tensors: dict[str, Tensor], files: dict[str, str]
) -> None:
    """Write a Hugging Face directory: `tensors` in the files they came from, all other files copied.

    An older directory of that name is replaced.
    """
    with _whole_or_absent(Path(directory)) as partial:
        for path in sorted(model_dir.iterdir()):
            if path.is_file() and path.name not in files.values():
                shutil.copyfile(path, partial / path.name)
        for file in sorted(set(files.values())):
            chosen = {name: tensors[name].contiguous() for name in tensors if files[name] == file}
            save_file(chosen, partial / file, metadata={"format": "pt"})


def _sharded_state(policy: OmniPolicy, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the tensors of a checkpoint, each with its place in the whole (one process: the whole)."""
    metadata = {
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    sharded = policy.language_model.sharded_state_dict(prefix=LANGUAGE_MODEL, metadata=metadata)
    model = {
        # The rest are empty Transformer Engine states, which would be pickled.
        name: value
        for name, value in sharded.items()
        if isinstance(value, ShardedTensor | ShardedTensorFactory)
    }
    for name, tensor in _model_tensors(policy).items():
        if not name.startswith(LANGUAGE_MODEL):
            model[name] = ShardedTensor.from_rank_offsets(name, tensor)
    trained = _trained(policy, optimizer)
    moments: dict[str, dict[str, Any]] = {moment: {} for moment in MOMENTS}
    for name, parameter in trained.items():
        for moment in MOMENTS:
            value = optimizer.state[parameter].get(moment)
            if value is not None:
                moments[moment][name] = make_sharded_optimizer_tensor(
                    model[name], value, f"optimizer.{moment}"
                )
    rng = ShardedTensor.from_rank_offsets("rng.torch", torch.get_rng_state())
    return {"model": model, "optimizer": moments, "rng": {"torch": rng}}


def _model_tensors(policy: OmniPolicy) -> dict[str, Tensor]:
    state = policy.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if torch.is_tensor(value)}


def _trained(policy: OmniPolicy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    chosen = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in policy.named_parameters() if id(parameter) in chosen}


def _create_moments(optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Give every parameter the state that AdamW would have after `num_steps` updates, moments still zero."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {}
            if num_steps:
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(num_steps)),
                    **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
                }


def _num_parameters(policy: OmniPolicy) -> int:
    return sum(parameter.numel() for parameter in policy.parameters())


def _describe(where: Path) -> dict[str, Any]:
    path = where / DESCRIPTION_FILE
    try:
        description = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"load_checkpoint: {path} must be a checkpoint's description, got {error}"
        ) from error
    missing = {"format", "num_parameters", "counts"} - set(description)
    if missing:
        raise TrainingError(f"load_checkpoint: {path} must have {sorted(missing)}, got {sorted(description)}")
    return description


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what megatron-core 0.16.1 provokes in torch 2.13 by its own calls; nothing here could heed it."""
    with warnings.catch_warnings():
        for category, message in CHECKPOINT_WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=category)
        yield


@contextmanager
def _whole_or_absent(target: Path) -> Iterator[Path]:
    """Yield a directory to write in, which takes the target's name when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    replaced = target.parent / f".{target.name}.{os.getpid()}.replaced"
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if target.exists():
            target.rename(replaced)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
