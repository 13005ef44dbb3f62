"""The language model of any family on Megatron-core: embeddings in, logits at chosen positions out.

It knows nothing of pictures or sounds: the caller splices the towers' outputs into the embeddings and names the
places where deepstack features are added. Weights come and go through `relax.train.names`.

Each rank builds its stage's layers and its part of each matrix (`relax.train.layout`); with one process that is all.

Shapes: T tokens of a sequence on this context parallel rank (R of them on this rank with sequence parallel), B
sequences, H hidden size, V vocabulary, N chosen positions, S visual places, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from relax.errors import TrainingError
from relax.models.families import Family, family_of_type
from relax.train.attention import Documents, MultiAxisRotary, PlainNorm, layer_spec
from relax.train.layout import LayoutConfig, ModelSizes, check_layout
from relax.train.mcore_compat import (
    GPTModel,
    TopKRouter,
    TransformerBlockSubmodules,
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)


@dataclass(frozen=True, kw_only=True)
class DecoderInputs:
    """What the decoder reads. Padding is on the right; a mask is needed only where causal order is not enough."""

    embeds_TBH: Tensor | None
    """None past the first pipeline stage."""
    position_ids_3BT: Tensor
    shape: tuple[int, ...] = ()
    """(T, B)."""
    hidden_B1TT: Tensor | None = None
    """bool, True where a token (first T) must not see another (second T: of all context parallel ranks); None: causal
    order."""
    documents: Documents | None = None
    """Packed sequences; None: sequences side by side."""
    deepstack: Sequence[Tensor] = ()
    """For each of the first layers what it adds at the visual places, [S, H]. With activation recompute it must
    not share a graph with the embeddings or between layers (`PromptTable.leaves` cuts it)."""
    visual_place_S: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    """Places of the visual tokens in the flattened [T * B] sequence."""


class ThinkerLanguageModel(GPTModel):
    """Megatron-core's GPT with rotary positions of three axes, deepstack, and logits only where they are asked.

    Attributes:
        vocab_size: Words of the model; the matrices have as many rows more as make tensor parallel ranks' parts equal.
        padded_vocab_size: Rows of the matrices.
    """

    def __init__(
        self,
        text_config: Any,
        *,
        family: Family | None = None,
        layout: LayoutConfig | None = None,
        stage: int = 0,
        tied: bool = False,
        recompute: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        layout = layout or LayoutConfig()
        family = family or family_of_type(text_config.model_type)
        check_layout(layout, model_sizes(text_config, tied=tied))
        config = transformer_config(
            text_config, family=family, layout=layout, recompute=recompute, dtype=dtype
        )
        layers = layout.stage_layers(config.num_layers)
        first = sum(layers[:stage])
        super().__init__(
            config=config,
            transformer_layer_spec=_block_spec(
                text_config, slice(first, first + layers[stage]), qk_norm=family.qk_norm
            ),
            vocab_size=padded_size(text_config.vocab_size, layout.tp),
            max_sequence_length=text_config.max_position_embeddings,
            pre_process=stage == 0,
            post_process=stage == layout.pp - 1,
            position_embedding_type="none",
            share_embeddings_and_output_weights=tied,
            scatter_embedding_sequence_parallel=False,
        )
        self.first_layer = first
        rope = text_config.rope_parameters
        sections = tuple(rope.get("mrope_section") or (config.kv_channels // 2, 0, 0))
        self.rotary = MultiAxisRotary(config.kv_channels, rope["rope_theta"], sections, family.rotary)
        self.vocab_size = text_config.vocab_size
        self.padded_vocab_size = padded_size(text_config.vocab_size, layout.tp)
        self._splits_norms = layout.splits_norms
        self._deepstack: list[tuple[Tensor, Tensor]] = []
        if stage == 0:
            for number, layer in enumerate(self.decoder.layers):
                layer.register_forward_hook(_AddDeepstack(self, number))
        if self.post_process:
            # Logits are of chosen tokens, which are gathered before: the matrix gets whole rows on every rank.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = layout.tp > 1

    @property
    def routers(self) -> list[TopKRouter]:
        """Routers of this rank's layers that have experts, first layer first."""
        return [module for module in self.decoder.modules() if isinstance(module, TopKRouter)]

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings of token ids of any shape, [..., H]."""
        return self.embedding.word_embeddings(token_ids)

    def hidden_states(self, inputs: DecoderInputs, received_RBH: Tensor | None = None) -> Tensor:
        """Return the hidden states after this stage's layers: [R, B, H], after the last stage normalised [T, B, H].

        Args:
            inputs: The micro-batch.
            received_RBH: The stage before's hidden states; None on the first.

        Raises:
            TrainingError: there are more deepstack features than layers.
        """
        if len(inputs.deepstack) > len(self.decoder.layers):
            raise TrainingError(
                f"hidden_states: deepstack must be for at most {len(self.decoder.layers)} layers, "
                f"got {len(inputs.deepstack)}"
            )
        embeds = inputs.embeds_TBH
        if embeds is not None and self._splits_norms:
            embeds = scatter_to_sequence_parallel_region(embeds)
        self.keep_visuals(inputs)
        self.decoder.set_input_tensor(received_RBH)
        hidden = self.decoder(
            hidden_states=embeds,
            attention_mask=inputs.hidden_B1TT,
            rotary_pos_emb=self.rotary(inputs.position_ids_3BT),
            packed_seq_params=inputs.documents,
        )
        if self.post_process and self._splits_norms:
            # Every tensor parallel rank computes the same from here on: a gradient is whole on each.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden

    def keep_visuals(self, inputs: DecoderInputs) -> None:
        """Remember the deepstack features of a micro-batch whose layers run next, now or in activation recompute."""
        self._deepstack = [self._own_visuals(inputs, features) for features in inputs.deepstack]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of chosen hidden states on the last stage, [N, H] to this rank's words, [N, V / tp].

        The last rank leaves out the words that only fill up its matrix.
        """
        weight = (
            self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        )
        logits = self.output_layer(hidden[:, None], weight=weight)[0][:, 0]
        first = (
            self.pg_collection.tp.rank() * logits.shape[1] if self.padded_vocab_size > self.vocab_size else 0
        )
        return logits[:, : self.vocab_size - first]

    def _own_visuals(self, inputs: DecoderInputs, features_SH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the visual places in [R * B] of this rank and what is added there."""
        if not self._splits_norms:
            return inputs.visual_place_S, features_SH
        features_SH = copy_to_tensor_model_parallel_region(
            features_SH
        )  # each rank sees a part of the gradient
        length, lines = inputs.shape
        count = length // self.config.tensor_model_parallel_size * lines
        place_S = inputs.visual_place_S - self.pg_collection.tp.rank() * count
        mine_S = (place_S >= 0) & (place_S < count)
        return place_S[mine_S], features_SH[mine_S]


class _AddDeepstack:
    """Forward hook of one decoder layer: add the visual features of this step, if there are any for the layer."""

    def __init__(self, model: ThinkerLanguageModel, number: int) -> None:
        self._model = model
        self._number = number

    def __call__(self, layer: Any, arguments: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
        if self._number >= len(self._model._deepstack):
            return None
        place_S, features_SH = self._model._deepstack[self._number]
        hidden_TBH, context = output
        added = hidden_TBH.flatten(0, 1).index_add(0, place_S, features_SH.to(hidden_TBH.dtype))
        return added.view_as(hidden_TBH), context


def model_sizes(text_config: Any, *, tied: bool = False) -> ModelSizes:
    """Return what a layout has to divide."""
    return ModelSizes(
        num_layers=text_config.num_hidden_layers,
        num_heads=text_config.num_attention_heads,
        num_groups=text_config.num_key_value_heads,
        dense_width=None if all(moe_layers(text_config)) else text_config.intermediate_size,
        num_experts=_num_experts(text_config) if any(moe_layers(text_config)) else None,
        tied=tied,
    )


def transformer_config(
    text_config: Any,
    *,
    family: Family | None = None,
    layout: LayoutConfig | None = None,
    recompute: bool = False,
    dtype: torch.dtype = torch.float32,
) -> TransformerConfig:
    """Translate a Hugging Face text configuration of a family, by default the one that it names.

    Raises:
        TrainingError: the configuration asks for what the layers here do not do.
    """
    family = family or family_of_type(text_config.model_type)
    _check_supported(text_config, family)
    layout = layout or LayoutConfig()
    stages = layout.stage_layers(text_config.num_hidden_layers)
    settings: dict[str, Any] = {
        "num_layers": text_config.num_hidden_layers,
        "hidden_size": text_config.hidden_size,
        "num_attention_heads": text_config.num_attention_heads,
        "num_query_groups": text_config.num_key_value_heads,
        "kv_channels": _head_size(text_config),
        "ffn_hidden_size": text_config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": text_config.rms_norm_eps,
        "qk_layernorm": family.qk_norm,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": layout.splits_norms,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "persist_layer_norm": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "cuda_graph_scope": [],
    }
    if len(set(stages)) > 1:
        settings["num_layers_in_first_pipeline_stage"] = stages[0]
    if any(moe_layers(text_config)):
        settings |= {
            "num_moe_experts": text_config.num_experts,
            "moe_router_topk": text_config.num_experts_per_tok,
            "moe_ffn_hidden_size": text_config.moe_intermediate_size,
            "moe_layer_freq": [int(is_moe) for is_moe in moe_layers(text_config)],
            "moe_router_pre_softmax": not getattr(text_config, "norm_topk_prob", True),
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
            "moe_enable_routing_replay": True,
        }
    if recompute:
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(**settings)


def moe_layers(text_config: Any) -> list[bool]:
    """Return for every layer whether it has experts."""
    if not _num_experts(text_config):
        return [False] * text_config.num_hidden_layers
    dense = set(text_config.mlp_only_layers or ())
    step = text_config.decoder_sparse_step
    return [n not in dense and (n + 1) % step == 0 for n in range(text_config.num_hidden_layers)]


def padded_size(vocab_size: int, parts: int) -> int:
    """Return the rows of a vocabulary's matrix that can be cut into so many equal parts."""
    return -(-vocab_size // parts) * parts


def _block_spec(text_config: Any, chosen: slice, *, qk_norm: bool) -> TransformerBlockSubmodules:
    num_experts = _num_experts(text_config)
    width = text_config.intermediate_size
    layers = [
        layer_spec(num_experts if is_moe else None, width, qk_norm=qk_norm)
        for is_moe in moe_layers(text_config)
    ]
    return TransformerBlockSubmodules(layer_specs=layers[chosen], layer_norm=PlainNorm)


def _num_experts(text_config: Any) -> int | None:
    return getattr(text_config, "num_experts", None) or None


def _head_size(text_config: Any) -> int:
    return (
        getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    )


def _check_supported(text_config: Any, family: Family) -> None:
    rope = text_config.rope_parameters
    sections = rope.get("mrope_section")
    is_interleaved = family.rotary == "interleaved"
    for what, value, allowed in (
        ("hidden_act", text_config.hidden_act, "silu"),
        ("rope_parameters.rope_type", rope["rope_type"], "default"),
        (
            "rope_parameters.mrope_interleaved",
            bool(rope.get("mrope_interleaved", is_interleaved)) if sections else is_interleaved,
            is_interleaved,
        ),
        ("attention_bias", bool(getattr(text_config, "attention_bias", False)), False),
        ("use_sliding_window", bool(getattr(text_config, "use_sliding_window", False)), False),
    ):
        if value != allowed:
            raise TrainingError(
                f"language model: {what} must be {allowed!r}, got {value!r}; not supported yet"
            )
