"""Checkpoints of a training run (Megatron's distributed format) and Hugging Face directories.

Layout of a checkpoint: the files of `megatron.core.dist_checkpointing`, and `trainer.json` {format, num_parameters,
counts}. Each kind of directory is written beside its final name, flushed and renamed, so it is whole or absent.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from relax.durable import flush, flush_tree
from relax.errors import TrainingError
from relax.models.checkpoint_files import is_weights_file, read_tensors, write_tensors
from relax.train.mcore_compat import (
    ShardedTensor,
    ShardedTensorFactory,
    dist_checkpointing,
    make_sharded_optimizer_tensor,
    parallel_state,
)
from relax.train.optimizer import Weights
from relax.train.policy import LANGUAGE_MODEL, OmniPolicy
from relax.train.shards import num_holders

FORMAT = 1
DESCRIPTION_FILE = "trainer.json"
CHECKPOINT_WARNINGS = (
    (FutureWarning, "`load_state_dict` is deprecated"),
    (FutureWarning, "Please use DTensor instead"),
)
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"


def write_checkpoint(
    directory: Path | str,
    policy: OmniPolicy,
    weights: Weights,
    counts: dict[str, int],
    beside: Mapping[str, dict[str, Tensor]] | None = None,
) -> None:
    """Write weights, optimizer state, random state and counts; an older checkpoint of that name is replaced.

    All ranks must call it, with one directory that all can write. Blocks until the files are on disk. `beside` are
    further safetensors files of the checkpoint, by name, as rank 0 has them.
    """
    world = policy.world
    num_parameters = _num_parameters(policy)
    with ExitStack() as stack:
        own = stack.enter_context(_whole_or_absent(Path(directory))) if world.rank == 0 else None
        partial = Path(world.tell(str(own)))
        with _quiet():
            dist_checkpointing.save(_sharded_state(policy, weights), str(partial))
        world.wait_for_all()
        if world.rank == 0:
            for name, tensors in (beside or {}).items():
                save_file(tensors, partial / name)
            description = {"format": FORMAT, "num_parameters": num_parameters, "counts": counts}
            (partial / DESCRIPTION_FILE).write_text(json.dumps(description, indent=1) + "\n")
    world.wait_for_all()


def read_checkpoint(directory: Path | str, policy: OmniPolicy, weights: Weights) -> dict[str, int]:
    """Load a checkpoint into a policy and its optimizer, restore the random state, and return the counts.

    All ranks must call it.

    Raises:
        TrainingError: there is no whole checkpoint, or it is of another model or format.
    """
    where = Path(directory)
    description = _describe(where)
    if description["format"] != FORMAT:
        raise TrainingError(
            f"load_checkpoint: {where} must be of format {FORMAT}, got {description['format']}"
        )
    num_parameters = _num_parameters(policy)
    if description["num_parameters"] != num_parameters:
        raise TrainingError(
            f"load_checkpoint: {where} must be of a model of {num_parameters} parameters, "
            f"got {description['num_parameters']}"
        )
    _create_moments(weights.optimizer, description["counts"]["num_steps"])
    state = _sharded_state(policy, weights)
    with _quiet():
        loaded = dist_checkpointing.load(state, str(where))
    with torch.no_grad():
        for name, tensor in _model_tensors(policy).items():
            tensor.copy_(loaded["model"][name])
        weights.take_over()
        for name in loaded["optimizer"].get(MASTER, {}):
            weights.masters[name].copy_(loaded["optimizer"][MASTER][name])
        for moment in MOMENTS:
            for name in state["optimizer"][moment]:
                ours = weights.optimizer.state[weights.masters[name]][moment]
                ours.copy_(loaded["optimizer"][moment][name])
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
    """Write a Hugging Face directory: tensors in the files named for them, all other files copied.

    Tensors of further models, which `tensors` lacks, are those of `model_dir`. An older directory of that name is
    replaced.
    """
    with _whole_or_absent(Path(directory)) as partial:
        for path in sorted(model_dir.iterdir()):
            if path.is_file() and not is_weights_file(path):
                shutil.copyfile(path, partial / path.name)
        foreign = read_tensors(model_dir, files.keys() - tensors.keys())
        write_tensors(partial, {**foreign, **tensors}, files)


def _sharded_state(policy: OmniPolicy, weights: Weights) -> dict[str, Any]:
    """Return the tensors of a checkpoint, each with its place in the whole."""
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
    place, layout = policy.world.place, policy.world.layout
    replica = (0, place.tp_rank, place.cp_rank + layout.cp * place.dp_rank)
    for name, tensor in _model_tensors(policy).items():
        if not name.startswith(LANGUAGE_MODEL):
            model[name] = ShardedTensor.from_rank_offsets(name, tensor, replica_id=replica)
    state: dict[str, dict[str, Any]] = {kind: {} for kind in (*MOMENTS, MASTER)}
    parameters = dict(policy.named_parameters())
    for name in weights.owned:
        master, whose = weights.masters[name], _owned(model[name], weights.shares_state)
        held = weights.optimizer.state[master]
        values = {moment: held[moment] for moment in MOMENTS if moment in held}
        if master is not parameters[name]:
            values[MASTER] = master
        for kind, value in values.items():
            state[kind][name] = make_sharded_optimizer_tensor(whose, value, f"optimizer.{kind}")
    rng = ShardedTensor.from_rank_offsets("rng.torch", torch.get_rng_state(), replica_id=policy.world.rank)
    return {"model": model, "optimizer": state, "rng": {"torch": rng}}


def _owned(place: Any, is_only_one: bool) -> Any:
    """Return a parameter's place in the whole for state that no data parallel neighbour has."""
    return replace(place, replica_id=(*place.replica_id[:-1], 0)) if is_only_one else place


def _model_tensors(policy: OmniPolicy) -> dict[str, Tensor]:
    state = policy.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if torch.is_tensor(value)}


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
    """Return the parameters of the whole model, on all ranks."""
    world = policy.world
    count = sum(p.numel() / num_holders(n, world, in_language_model=True) for n, p in policy.global_names())
    count += sum(p.numel() / num_holders(n, world, in_language_model=False) for n, p in policy.towers())
    return round(world.sum(torch.tensor(float(count), dtype=torch.float64, device=world.device)).item())


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
        flush_tree(partial)
        if target.exists():
            target.rename(replaced)
        partial.rename(target)
        flush(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
