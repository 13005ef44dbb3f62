"""megatron-core 0.16.1 where it assumes CUDA or Transformer Engine: the one place that mends it.

Everything that we use of megatron-core is imported here, with its import-time warnings silenced, and taken
from here. `install_shims` changes what is listed below and nothing else; the shims for machines without a GPU
are inert when CUDA is there. Each shim says what breaks without it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import queue
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

MEGATRON_VERSION = "0.16.1"
"""The version whose internals the shims name."""

IMPORT_WARNINGS = (
    (UserWarning, "Transformer Engine and Apex are not installed"),
    (UserWarning, "Apex is not installed"),
    (DeprecationWarning, "The following imports from `dynamic_context.py` will be removed"),
    (DeprecationWarning, r"\s*The 'megatron\.core\.transformer\.custom_layers"),
    (DeprecationWarning, "`torch.jit.script"),
)
"""What megatron-core says on import without Transformer Engine; none of it concerns the local layer spec."""


def check_version(found: str) -> None:
    """Refuse a megatron-core that the shims were not written for."""
    if found != MEGATRON_VERSION:
        raise ImportError(
            f"relax.train: megatron-core must be {MEGATRON_VERSION}, got {found}; "
            f"pip install megatron-core=={MEGATRON_VERSION}"
        )


@contextmanager
def compiling_nothing() -> Iterator[None]:
    """Without CUDA, leave functions that are marked for `torch.compile` inside the block as they are.

    megatron-core marks its fusions on import, which alone loads torch's compiler (more than a second for each process)
    and would have their first call look for a C++ compiler.
    """
    if torch.cuda.is_available():
        yield
        return
    real = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]  # as a decorator without arguments
    try:
        yield
    finally:
        torch.compile = real


check_version(importlib.metadata.version("megatron-core"))
with warnings.catch_warnings(), compiling_nothing():
    for _category, _message in IMPORT_WARNINGS:
        warnings.filterwarnings("ignore", message=_message, category=_category)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import (
        ShardedTensor,
        ShardedTensorFactory,
        is_main_replica,
    )
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        model_parallel_cuda_manual_seed,
        scatter_to_sequence_parallel_region,
    )
    from megatron.core.tensor_parallel import layers as parallel_layers
    from megatron.core.tensor_parallel import random as parallel_random
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "EngineParts",
    "GPTModel",
    "MegatronModule",
    "ModuleSpec",
    "RouterReplay",
    "RouterReplayAction",
    "ShardedTensor",
    "ShardedTensorFactory",
    "TopKRouter",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "copy_to_tensor_model_parallel_region",
    "dist_checkpointing",
    "gather_from_sequence_parallel_region",
    "get_gpt_layer_local_spec",
    "install_shims",
    "is_main_replica",
    "make_sharded_optimizer_tensor",
    "model_parallel_cuda_manual_seed",
    "parallel_state",
    "scatter_to_sequence_parallel_region",
    "transformer_engine",
]


@dataclass(frozen=True)
class EngineParts:
    """Transformer Engine's layers under Megatron-core's interface; parameters have the local layers' names."""

    column_linear: Any
    row_linear: Any
    norm: Any


def transformer_engine() -> EngineParts | None:
    """Return Transformer Engine's layers when it is installed and CUDA is there, else None."""
    if not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None:
        return None
    from megatron.core.extensions import transformer_engine as engine

    return EngineParts(engine.TEColumnParallelLinear, engine.TERowParallelLinear, engine.TENorm)


def install_shims() -> None:
    """Apply the shims that this machine needs. Idempotent; call before the first model is built."""
    _define_missing_gemm()
    _write_checkpoints_in_process()
    _name_the_tensor_parallel_group()
    if not torch.cuda.is_available():
        _name_the_cpu_as_current_device()
        _skip_cuda_rng_in_recompute()
        _keep_dispatcher_off_cuda_streams()


def _define_missing_gemm() -> None:
    """Without Transformer Engine `te_general_gemm` is never defined, and the router gate raises NameError."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _write_checkpoints_in_process() -> None:
    """Write checkpoint shards in this process.

    megatron-core forks writer processes and spawns a queue server that imports the main module again: a child
    forked from a process with Arrow Flight threads can hang, and the spawn needs a guard in every program.
    """
    filesystem_async._get_write_results_queue = queue.Queue
    filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write_buckets)


def _write_buckets(
    transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]
) -> None:
    written: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        outcome: queue.Queue[Any] = queue.Queue()
        unfinished: queue.Queue[int] = queue.Queue()
        unfinished.put(index)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, index, bucket, outcome, unfinished, use_fsync=True, use_msc=use_msc
        )
        _, result = outcome.get_nowait()
        if isinstance(result, Exception):
            results.put(result)
            return
        written[index] = result
    results.put(written)


def _name_the_tensor_parallel_group() -> None:
    """The linear layers leave out the group in their own calls and then warn of it, at every call."""

    def group_or_default(tp_group: Any, is_expert: bool = False, check_initialized: bool = True) -> Any:
        if tp_group is not None or not parallel_state.is_initialized():
            return tp_group
        if is_expert:
            return parallel_state.get_expert_tensor_parallel_group(check_initialized=check_initialized)
        return parallel_state.get_tensor_model_parallel_group(check_initialized=check_initialized)

    parallel_layers.get_tensor_model_parallel_group_if_none = group_or_default


def _name_the_cpu_as_current_device() -> None:
    """Allocate on the CPU where megatron-core says `device=torch.cuda.current_device()`.

    Without it the router, global buffers and gradient buffers raise; checkpointing synchronises a device.
    """
    cpu = torch.device("cpu")
    current_device: Callable[[], Any] = lambda: cpu  # noqa: E731
    torch.cuda.current_device = current_device
    torch.cuda.synchronize = lambda device=None: None


def _skip_cuda_rng_in_recompute() -> None:
    """Activation recompute saves and restores the CUDA generator too, which is not there."""
    parallel_random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)
    parallel_random._set_cuda_rng_state = lambda *args, **kwargs: None


def _keep_dispatcher_off_cuda_streams() -> None:
    """The all-to-all dispatcher copies split sizes on a side stream; here they only must become integers."""

    def take_split_sizes(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if not self.drop_and_pad and point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits"):
                splits = getattr(self, name)
                if torch.is_tensor(splits):
                    setattr(self, name, splits.tolist())
        return tokens_per_expert

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = take_split_sizes
