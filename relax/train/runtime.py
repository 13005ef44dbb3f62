"""The process's place in the parallel world: torch.distributed, Megatron's groups and random state.

One process now (data, tensor, pipeline and expert parallel sizes of one). Nothing here opens a network socket.
"""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.distributed as dist

from relax.train.mcore_compat import install_shims, model_parallel_cuda_manual_seed, parallel_state


def start_parallel(seed: int) -> None:
    """Join the parallel world once per process, and seed every generator. Idempotent but for the seeds."""
    install_shims()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Without CUDA Megatron's tracker of generator states has nothing to track; dropout is zero everywhere.
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=not torch.cuda.is_available())
    torch.manual_seed(seed)
