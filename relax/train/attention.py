"""Layer parts that run on any device: attention through torch's own kernel, norms, and interleaved rotary positions.

They are plugged into Megatron-core's local layer specification; parameter names stay Megatron's.

Shapes: T tokens of a sequence, B sequences, N heads, K key/value heads, D head size, 3 rotary axes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from relax.train.mcore_compat import MegatronModule, ModuleSpec, get_gpt_layer_local_spec


class PlainNorm:
    """Builds torch's RMSNorm where Megatron-core asks for a norm (its wrapper refuses sequence parallelism)."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> Any:
        norm = nn.RMSNorm(hidden_size, eps=eps)
        norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class SdpaAttention(MegatronModule):
    """Scaled dot-product attention: causal without a mask, otherwise a boolean mask (True is hidden)."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale

    def forward(
        self,
        query_TBND: Tensor,
        key_TBKD: Tensor,
        value_TBKD: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        **unsupported: Any,
    ) -> Tensor:
        """Return the heads' outputs side by side, [T, B, N * D]."""
        given = [name for name, value in unsupported.items() if value is not None]
        if given:
            raise ValueError(f"SdpaAttention: {given} must be absent; pad sequences instead of packing them")
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_TBND, key_TBKD, value_TBKD))
        out_BNTD = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if attention_mask is None else ~attention_mask,
            is_causal=attention_mask is None,
            scale=self._scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out_BNTD.permute(2, 0, 1, 3).flatten(2)


class InterleavedRotary(nn.Module):
    """Rotary angles with time, height and width interleaved over the frequencies (T H W T H W ... T T).

    Source: Qwen3-VL and Qwen3-Omni in transformers 5.12 (`apply_interleaved_mrope`).
    """

    inverse_frequencies: Tensor
    axis: Tensor

    def __init__(self, head_size: int, theta: float, sections: tuple[int, int, int]) -> None:
        super().__init__()
        half = head_size // 2
        exponent = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        axis = torch.zeros(half, dtype=torch.long)
        for number in (1, 2):
            axis[number : sections[number] * 3 : 3] = number
        self.register_buffer("inverse_frequencies", 1.0 / theta**exponent, persistent=False)
        self.register_buffer("axis", axis, persistent=False)

    def forward(self, position_ids_3BT: Tensor) -> Tensor:
        """Return float32 angles [T, B, 1, D] as Megatron-core applies them."""
        position_TBF = position_ids_3BT.float().permute(2, 1, 0)[..., self.axis]
        angle_TBF = position_TBF * self.inverse_frequencies
        return torch.cat((angle_TBF, angle_TBF), dim=-1)[:, :, None]


def layer_spec(num_experts: int | None, ffn_hidden_size: int) -> ModuleSpec:
    """Return one decoder layer: the local specification with the parts above; dense without experts.

    `ffn_hidden_size` is the width of a dense layer's feed-forward part; experts have theirs from the config.
    """
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    layer = spec.submodules
    if num_experts is None:
        layer.mlp.params["ffn_hidden_size"] = ffn_hidden_size
    layer.input_layernorm = layer.pre_mlp_layernorm = PlainNorm
    attention = layer.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = PlainNorm
    attention.core_attention = SdpaAttention
    return spec
