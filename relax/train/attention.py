"""Layer parts that run on any device: attention through torch's own kernel, norms, and rotary positions of three axes.

They are plugged into Megatron-core's local layer specification; parameter names stay Megatron's.

Context parallel ranks hold tokens r and 2 cp - 1 - r of 2 cp equal pieces of the sequence, so that all have as much
of the causal triangle. Queries stay, keys and values are gathered.

Shapes: T tokens of a sequence, Q of them on this rank (all of them without context parallel), B sequences, N heads,
K key/value heads, D head size, 3 rotary axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from relax.train.mcore_compat import (
    EngineParts,
    MegatronModule,
    ModuleSpec,
    get_gpt_layer_local_spec,
    parallel_state,
    transformer_engine,
)
from relax.train.ranks import GatherTokens


class PlainNorm:
    """Builds torch's RMSNorm where Megatron-core asks for a norm (its wrapper refuses sequence parallelism)."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> Any:
        norm = nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by Megatron-core
        return norm


def local_tokens(length: int, ranks: int, rank: int) -> Tensor:
    """Return the places in the sequence of the tokens that a context parallel rank holds, [Q]."""
    if ranks == 1:
        return torch.arange(length)
    pieces = torch.arange(length).chunk(2 * ranks)
    return torch.cat((pieces[rank], pieces[2 * ranks - 1 - rank]))


@dataclass(frozen=True)
class Document:
    """One packed sequence: its tokens among this rank's queries and among all keys, and what is hidden.

    queries: places in [0, Q), rising. keys: a range of [0, T). hidden_QT: None is causal, for whole documents only.
    """

    queries: slice | Tensor
    keys: slice
    hidden_QT: Tensor | None


@dataclass(frozen=True)
class Documents:
    """All packed sequences of a micro-batch; every query is in one of them.

    Megatron-core hands it through as packed sequence parameters. The format that it names keeps the batch axis:
    positions are absolute here, so Megatron-core need not know where a document begins.
    """

    parts: Sequence[Document]
    qkv_format: str = "sbhd"


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
        self._num_gathered = config.context_parallel_size

    def forward(
        self,
        query_QBND: Tensor,
        key_QBKD: Tensor,
        value_QBKD: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        packed_seq_params: Documents | None = None,
        **unsupported: Any,
    ) -> Tensor:
        """Return the heads' outputs side by side, [Q, B, N * D]."""
        given = [name for name, value in unsupported.items() if value is not None]
        if given:
            raise ValueError(
                f"SdpaAttention: {given} must be absent; only masks and packed documents are known"
            )
        key_TBKD, value_TBKD = self._gather(key_QBKD), self._gather(value_QBKD)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_QBND, key_TBKD, value_TBKD))
        if packed_seq_params is None:
            out_BNQD = self._attend(query, key, value, attention_mask)
        else:
            out_BNQD = torch.empty_like(query)
            for part in packed_seq_params.parts:
                key_part, value_part = key[:, :, part.keys], value[:, :, part.keys]
                done = self._attend(query[:, :, part.queries], key_part, value_part, part.hidden_QT)
                out_BNQD[:, :, part.queries] = done
        return out_BNQD.permute(2, 0, 1, 3).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> Tensor:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if hidden is None else ~hidden,
            is_causal=hidden is None,
            scale=self._scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _gather(self, own_QBKD: Tensor) -> Tensor:
        """Return the tokens of all context parallel ranks in the order of the sequence, [T, B, K, D]."""
        ranks = self._num_gathered
        if ranks == 1:
            return own_QBKD
        gathered = GatherTokens.apply(own_QBKD, parallel_state.get_context_parallel_group())
        length = len(gathered)
        places = torch.cat([local_tokens(length, ranks, rank) for rank in range(ranks)])
        return gathered[places.argsort().to(gathered.device)]


class MultiAxisRotary(nn.Module):
    """Rotary angles with time, height and width shared out over the frequencies.

    `interleaved`: T H W T H W ... T T; `blocks`: T ... T H ... H W ... W.

    Source: Qwen3-VL and Qwen3-Omni (`apply_interleaved_mrope`), Qwen2.5-VL and Qwen2.5-Omni
    (`apply_multimodal_rotary_pos_emb`) in transformers 5.12.
    """

    inverse_frequencies: Tensor
    axis: Tensor

    def __init__(
        self,
        head_size: int,
        theta: float,
        sections: tuple[int, int, int],
        order: Literal["interleaved", "blocks"] = "interleaved",
    ) -> None:
        super().__init__()
        half = head_size // 2
        exponent = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        if order == "blocks":
            axis = torch.arange(3).repeat_interleave(torch.tensor(sections))
        else:
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


def layer_spec(num_experts: int | None, ffn_hidden_size: int, *, qk_norm: bool = True) -> ModuleSpec:
    """Return one decoder layer: the local specification with the parts above; dense without experts.

    `ffn_hidden_size` is the width of a dense layer's feed-forward part; experts have theirs from the config.
    """
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts, moe_grouped_gemm=False, qk_layernorm=qk_norm, normalization="RMSNorm"
    )
    layer = spec.submodules
    if num_experts is None:
        layer.mlp.params["ffn_hidden_size"] = ffn_hidden_size
    layer.input_layernorm = layer.pre_mlp_layernorm = PlainNorm
    attention = layer.self_attention.submodules
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = PlainNorm
    attention.core_attention = SdpaAttention
    parts = transformer_engine()
    if parts is not None:
        use_engine(spec, parts, qk_norm=qk_norm)
    return spec


def use_engine(spec: ModuleSpec, parts: EngineParts, *, qk_norm: bool = True) -> None:
    """Put Transformer Engine's matrices and norms into a layer; attention stays, for the masks that it must know."""
    layer = spec.submodules
    attention = layer.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = parts.norm
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = parts.norm
    attention.linear_qkv, attention.linear_proj = parts.column_linear, parts.row_linear
    experts = getattr(layer.mlp.submodules, "experts", None)
    feed_forward = layer.mlp.submodules if experts is None else experts.submodules
    feed_forward.linear_fc1, feed_forward.linear_fc2 = parts.column_linear, parts.row_linear
