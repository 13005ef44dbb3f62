"""An SGLang plugin: the few places in which the CPU path without AMX still assumes CUDA. Seen in SGLang 0.5.21."""

from __future__ import annotations

import importlib
import types

import stand_in


def activate() -> None:
    """Mend what is to be mended; SGLang calls this in each of its processes."""
    if not stand_in.needed():
        return
    _plain_host_memory()
    _deterministic_on_torch()
    _checksums_without_cuda()
    _unpinned_routing_cache()


def _plain_host_memory() -> None:
    """The host cache of routed experts is registered with CUDA unless the device is an NPU or XPU."""
    import torch
    from sglang.srt.mem_cache.pool_host import common

    def allocate(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
        return torch.empty(dims, dtype=dtype, device="cpu")

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def _deterministic_on_torch() -> None:
    """Seeds of single requests need `--enable-deterministic-inference`, which refuses the torch attention and turns
    on Triton kernels; the torch kernels give the same result for a row whatever else is in the batch, up to rounding.
    """
    from sglang.srt import batch_invariant_ops, server_args

    choices = server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    if "torch_native" not in choices:
        choices.append("torch_native")
    batch_invariant_ops.enable_batch_invariant_mode = lambda *arguments, **options: None


def _checksums_without_cuda() -> None:
    """The checksum of the weights waits for CUDA before and after it is computed."""
    from sglang.srt.utils import weight_checker

    nothing = types.SimpleNamespace(synchronize=lambda: None)
    weight_checker.torch = _Torch({"cuda": nothing})


def _unpinned_routing_cache() -> None:
    """Up to 0.5.18 the host cache of routed experts is made by `torch.zeros(..., pin_memory=True)`."""
    import torch

    def unpinned(make):
        return lambda *sizes, pin_memory=False, **options: make(*sizes, **options)

    for name in ("sglang.srt.state_capturer.base", "sglang.srt.layers.moe.routed_experts_capturer"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if getattr(module, "torch", None) is torch:
            module.torch = _Torch({name: unpinned(getattr(torch, name)) for name in ("zeros", "empty")})


class _Torch(types.ModuleType):
    """torch with some names replaced, for one module's eyes."""

    def __init__(self, replaced: dict[str, object]) -> None:
        super().__init__("torch")
        self.__dict__.update(replaced)

    def __getattr__(self, name: str):
        import torch

        return getattr(torch, name)
