"""Checkpoints of a training run (Megatron's distributed format) and Hugging Face directories.

Layout of a checkpoint: the files of `megatron.core.dist_checkpointing`, and `trainer.json` {format, num_parameters,
counts}. Each kind of directory is written beside its final name, flushed and renamed, so it is whole or absent.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from relax.durable import whole_or_absent
from relax.errors import TrainingError
from relax.train.mcore_compat import (
    ShardedTensor,
    ShardedTensorFactory,
    dist_checkpointing,
    is_main_replica,
    make_sharded_optimizer_tensor,
    parallel_state,
)
from relax.train.names import VOCABULARY
from relax.train.optimizer import Weights
from relax.train.policy import LANGUAGE_MODEL, OmniPolicy
from relax.train.shards import num_holders

FORMAT = 1
GIVE_UP_DEADLINE_S = 30.0
DESCRIPTION_FILE = "trainer.json"
CHECKPOINT_WARNINGS = (
    (FutureWarning, "`load_state_dict` is deprecated"),
    (FutureWarning, "Please use DTensor instead"),
)
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"


class CheckpointWriter:
    """A checkpoint on its way to the disk: weights, optimizer state, random state and counts of one moment.

    Life cycle: made (all ranks; what is written is fixed from here on) -> `is_written` -> `finish` (all ranks): the
    directory has its name, an older one of that name is replaced. In between a thread writes, and training may go on.

    Args:
        directory: That all ranks can write.
        policy: Whose weights are written.
        weights: Their masters and optimizer state.
        facts: Of rank 0: `counts` go on in a resumed run; all of it is in the description.
        beside: Further safetensors files of the checkpoint, by name, as rank 0 has them.
        in_background: Copy the state to host memory first; else making it blocks until the files are written.
        fill: Puts more into the directory, called by rank 0's thread.
    """

    def __init__(
        self,
        directory: Path | str,
        policy: OmniPolicy,
        weights: Weights,
        facts: Mapping[str, Any],
        *,
        beside: Mapping[str, dict[str, Tensor]] | None = None,
        in_background: bool = False,
        fill: Callable[[Path], None] | None = None,
    ) -> None:
        self._world = policy.world
        self._beside = dict(beside or {})
        self._description = {"format": FORMAT, "num_parameters": _num_parameters(policy), **facts}
        self._fill = fill if policy.world.rank == 0 else None
        self._error: BaseException | None = None
        self._open = ExitStack()
        with self._removed_on_failure():
            own = None
            if self._world.rank == 0:
                own = self._open.enter_context(whole_or_absent(Path(directory)))
            self._partial = Path(self._world.tell(str(own)))
            state = _sharded_state(policy, weights)
            if in_background:
                _take_copies(state)
            with _quiet():
                self._request = dist_checkpointing.save(state, str(self._partial), async_sharded_save=True)
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()
        if not in_background:
            self._thread.join()

    @property
    def is_written(self) -> bool:
        """Whether this rank's files are on the disk, or could not be written."""
        return not self._thread.is_alive()

    def finish(self, deadline_s: float) -> None:
        """Give the checkpoint its name. Blocks until it is on the disk. All ranks must call it.

        Raises:
            TrainingError: it could not be written, or not within the deadline.
        """
        self._thread.join(deadline_s)
        with self._removed_on_failure():
            if self._thread.is_alive():
                raise TrainingError(
                    f"save_checkpoint: {self._partial} must be written within {deadline_s:.0f} s, got no end"
                )
            if self._error is not None:
                raise TrainingError(
                    f"save_checkpoint: {self._partial} must be written, got {self._error}"
                ) from self._error
            with _quiet():
                for finalize in self._request.finalize_fns:
                    finalize()
            if self._world.rank == 0:
                for name, tensors in self._beside.items():
                    save_file(tensors, self._partial / name)
                (self._partial / DESCRIPTION_FILE).write_text(json.dumps(self._description, indent=1) + "\n")
        self._open.close()
        self._world.wait_for_all()

    def give_up(self) -> None:
        """Leave nothing behind of a checkpoint that is not finished. Idempotent."""
        self._thread.join(GIVE_UP_DEADLINE_S)
        with suppress(TrainingError), self._open:
            raise TrainingError("save_checkpoint: given up")

    @contextmanager
    def _removed_on_failure(self) -> Iterator[None]:
        """Remove the directory if the block fails."""
        try:
            yield
        except BaseException as error:
            self._open.__exit__(type(error), error, error.__traceback__)
            raise

    def _write(self) -> None:
        request = self._request
        try:
            arguments = list(request.async_fn_args)
            if request.preload_fn is not None:
                arguments[1] = request.preload_fn()
            if request.async_fn is not None:
                request.async_fn(*arguments, **request.async_fn_kwargs)
            if self._fill is not None:
                self._fill(self._partial)
        except Exception as error:
            self._error = error


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


def _take_copies(state: dict[str, Any]) -> None:
    """Replace the tensors that this rank writes by copies in host memory, which training does not change."""
    for value in state.values():
        if isinstance(value, dict):
            _take_copies(value)
        elif value.data is not None and is_main_replica(value.replica_id):
            value.data = value.data.detach().to("cpu", copy=True)


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
    """Return the parameters of the whole model, on all ranks; rows that fill up the vocabulary are none."""
    world, model = policy.world, policy.language_model
    count = 0.0
    for name, tensor in policy.global_names():
        part = model.vocab_size / model.padded_vocab_size if name in VOCABULARY else 1.0
        count += part * tensor.numel() / num_holders(name, world, in_language_model=True)
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
