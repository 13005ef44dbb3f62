"""The process's place in the parallel world: torch.distributed, Megatron's groups and random state.

One process opens no network socket. Several are told by their environment where they meet, as torchrun or the
driver sets it: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import os
import random
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relax.errors import TrainingError
from relax.launch.ranks import listen
from relax.train.layout import LayoutConfig
from relax.train.mcore_compat import install_shims, model_parallel_cuda_manual_seed, parallel_state
from relax.train.ranks import World

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_joined: list[World] = []
"""The world of this process: one at most."""


def start_parallel(seed: int, layout: LayoutConfig | None = None, *, deadline_s: float = 600.0) -> World:
    """Join the parallel world once per process, and seed every generator. Idempotent but for the seeds.

    Args:
        seed: The same on all ranks: dropout is zero everywhere, and the weights are read from files.
        layout: The trainer's; one process by default.
        deadline_s: Longest wait for another rank, now and in every collective.

    Raises:
        TrainingError: the environment does not say where the ranks meet, or of another number of ranks.
    """
    layout = layout or LayoutConfig()
    install_shims()
    device = rank_device()
    if not dist.is_initialized():
        _join(layout, device, timedelta(seconds=deadline_s))
    if not _joined:
        _joined.append(_take_place(layout, device, deadline_s))
    if _joined[0].layout != layout:
        raise TrainingError(
            f"start_parallel: the layout must be that of this process's other trainers, {_joined[0].layout}, "
            f"got {layout}; leave_parallel() first"
        )
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Without CUDA Megatron's tracker of generator states has nothing to track; dropout is zero everywhere.
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=not torch.cuda.is_available())
    torch.manual_seed(seed)
    return _joined[0]


def leave_parallel(*, for_good: bool = True) -> None:
    """Give up this process's place; all ranks call it. Unless `for_good` they may then take another layout's places."""
    _joined.clear()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if for_good and dist.is_initialized():
        dist.destroy_process_group()


def rank_device() -> torch.device:
    """Return the device of this rank: the GPU of its LOCAL_RANK where there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _join(layout: LayoutConfig, device: torch.device, timeout: timedelta) -> None:
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if layout.num_procs == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    missing = [name for name in RANK_VARIABLES if name not in os.environ]
    if missing:
        raise TrainingError(
            f"start_parallel: the environment must have {', '.join(RANK_VARIABLES)} for {layout.num_procs} ranks, "
            f"got no {missing[0]}; start them by the pipeline or by torchrun"
        )
    if int(os.environ["WORLD_SIZE"]) != layout.num_procs:
        raise TrainingError(
            f"start_parallel: WORLD_SIZE must be the layout's {layout.num_procs} processes, "
            f"got {os.environ['WORLD_SIZE']}"
        )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun listens itself
        dist.init_process_group(backend, init_method="env://", timeout=timeout)
        return
    rank, num_ranks = int(os.environ["RANK"]), layout.num_procs
    store = _meet(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, num_ranks, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def _meet(address: str, port: int, rank: int, num_ranks: int, timeout: timedelta) -> dist.TCPStore:
    """Return the store of all ranks, which rank 0 keeps, at that address only."""
    if rank:
        return dist.TCPStore(address, port, num_ranks, False, timeout)
    try:
        door = listen(address, port)
    except OSError as error:
        raise TrainingError(
            f"start_parallel: MASTER_ADDR and MASTER_PORT must be free to listen on, got {address}:{port} ({error})"
        ) from error
    return dist.TCPStore(address, port, num_ranks, True, timeout, master_listen_fd=door.detach())


def _take_place(layout: LayoutConfig, device: torch.device, deadline_s: float) -> World:
    if dist.get_world_size() != layout.num_procs:
        raise TrainingError(
            f"start_parallel: the layout must be of the {dist.get_world_size()} ranks that are there, "
            f"got one of {layout.num_procs}"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        # Megatron's default is tp, which would cut the experts too.
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, round(deadline_s / 60)),
        create_gloo_process_groups=False,
    )
    rank, shared = dist.get_rank(), layout.tp * layout.cp
    own_group: Any = None
    own_ranks: tuple[int, ...] = (rank,)
    for first in range(0, layout.num_procs if shared > 1 else 0, shared):
        ranks = tuple(range(first, first + shared))
        group = dist.new_group(list(ranks))  # every rank has to make every group
        if rank in ranks:
            own_group, own_ranks = group, ranks
    return World(
        rank=rank,
        layout=layout,
        place=layout.place(rank),
        device=device,
        stage_group=own_group,
        stage_ranks=own_ranks,
    )
