"""Stands in for the sgl_kernel binary on a CPU: whatever SGLang imports is there, and raises when it is called."""

from __future__ import annotations

import stand_in

if stand_in.needed():
    import torch

    from sgl_kernel import murmur
    from sgl_kernel.missing import missing

    __version__ = "0.4.7"

    # Read when SGLang's modules are imported and not called by Qwen2, Qwen3, their MoE, VL and Omni models. Never add
    # "convert_weight_packed": its presence is how SGLang decides that the AMX kernels exist.
    READ_AT_IMPORT = (
        "fused_sigmoid_mul_cpu",
        "fused_qk_gemma_rmsnorm_cpu",
        "fused_qk_gemma_rmsnorm_with_gate_cpu",
        "fused_qkvzba_split_reshape_cat_contiguous_cpu",
        "fused_qkvzba_split_reshape_cat_cpu",
        "fused_gdn_gating_cpu",
        "fused_sigmoid_gating_delta_rule_update_cpu",
        "fused_moe_router_cpu",
        "fused_rmsnorm_gated_cpu",
    )
    for _name in READ_AT_IMPORT:
        if not hasattr(torch.ops.sgl_kernel, _name):
            setattr(torch.ops.sgl_kernel, _name, missing(_name))
    murmur.register()

    def __getattr__(name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return missing(name)

else:
    stand_in.give_way("sgl_kernel")
