"""The policy that is trained: Hugging Face towers and Megatron-core language model, from and to one checkpoint format.

It turns prompts into embeddings once for each group, and micro-batches into logits of the completion tokens. It
computes no loss and updates nothing.

Shapes: P prompts, T tokens (padded), F = P * T flat prompt places, C completion tokens of the batch, N predicted
tokens of a micro-batch, H hidden size, V vocabulary, S visual tokens, 3 rotary axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from relax.errors import TrainingError
from relax.models.inputs import PromptInputs
from relax.models.thinker import collate, embed, load_thinker, train_towers
from relax.train.batch import MicroBatch, RoutingShape
from relax.train.language_model import DecoderInputs, ThinkerLanguageModel
from relax.train.names import NameMap
from relax.train.replay import ReplaySession, replay_routing

LANGUAGE_MODEL = "language_model."
"""What the names of the language model's parameters start with; the towers' are those of Hugging Face."""


@dataclass(frozen=True, kw_only=True)
class PromptTable:
    """Embedded prompts of a batch, flat, from which micro-batches pick."""

    embeds_FH: Tensor
    position_ids_3F: Tensor
    visual_rank_F: Tensor
    """Index of a visual token's features in `deepstack`; -1 for other tokens."""
    deepstack: list[Tensor]
    """[S, H] for each of the first layers."""
    next_position_P: Tensor

    def leaves(self) -> PromptTable:
        """Return a copy cut from the graph, whose gradients gather over micro-batches."""
        return PromptTable(
            embeds_FH=_leaf(self.embeds_FH),
            position_ids_3F=self.position_ids_3F,
            visual_rank_F=self.visual_rank_F,
            deepstack=[_leaf(features) for features in self.deepstack],
            next_position_P=self.next_position_P,
        )

    def backward(self, leaves: PromptTable) -> None:
        """Send the gradients that gathered in `leaves` on through the towers and the token embedding."""
        pairs = [
            (ours, leaf.grad)
            for ours, leaf in zip(
                (self.embeds_FH, *self.deepstack), (leaves.embeds_FH, *leaves.deepstack), strict=True
            )
            if ours.requires_grad and leaf.grad is not None
        ]
        torch.autograd.backward([ours for ours, _ in pairs], [grad for _, grad in pairs])


class OmniPolicy(nn.Module):
    """Towers and language model of one model directory, in fp32."""

    def __init__(self, model_dir: Path, *, freeze_towers: bool = False, recompute: bool = False) -> None:
        """Load the directory.

        Raises:
            relax.models.errors.CheckpointError: files or tensors of the thinker are missing.
            TrainingError: the directory holds a tensor that the model does not have, or one of another shape.
        """
        super().__init__()
        self._thinker = load_thinker(model_dir)
        hf, text_config = self._thinker.hf, self._thinker.hf.config.text_config
        # Of the Hugging Face module only the towers stay; its language model is Megatron's from here on.
        hf.model, hf.lm_head = nn.Module(), nn.Module()
        train_towers(self._thinker, not freeze_towers)
        self.visual, self.audio_tower = hf.visual, hf.audio_tower
        tied = bool(getattr(hf.config, "tie_word_embeddings", False))
        self.language_model = ThinkerLanguageModel(text_config, tied=tied, recompute=recompute)
        self._frozen = freeze_towers
        self._files = tensor_files(model_dir)
        self._dtypes = self._load(model_dir)

    @property
    def vocab_size(self) -> int:
        return self._thinker.spec.vocab_size

    @property
    def routing_shape(self) -> RoutingShape | None:
        """What the rollout's routing must look like; None for a dense model."""
        config, routers = self.language_model.config, self.language_model.routers
        if not routers:
            return None
        return RoutingShape(
            num_layers=len(routers), top_k=config.moe_router_topk, num_experts=config.num_moe_experts
        )

    def towers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the towers' parameters."""
        for name, parameter in self.named_parameters():
            if not name.startswith(LANGUAGE_MODEL):
                yield name, parameter

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return all weights under the directory's names and in its types; views where the layouts allow."""
        tensors = self.checkpoint_names(self.state_dict())
        return {name: tensors[name].to(dtype) for name, dtype in self._dtypes.items()}

    def checkpoint_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the policy's names (weights, gradients) under the directory's names and layouts."""
        ours = {n.removeprefix(LANGUAGE_MODEL): t for n, t in tensors.items() if n.startswith(LANGUAGE_MODEL)}
        decoder = ((name, tensor) for name, tensor in ours.items() if torch.is_tensor(tensor))
        named = dict(self._name_map.to_checkpoint(decoder))
        return named | {self._prefix + n: t for n, t in tensors.items() if not n.startswith(LANGUAGE_MODEL)}

    def files(self) -> dict[str, str]:
        """Return the file of the model directory that each tensor came from."""
        return dict(self._files)

    def embed_prompts(self, prompts: Sequence[PromptInputs]) -> PromptTable:
        """Run the towers once over the prompts; the result carries their graph unless they are frozen."""
        batch = collate(prompts, self._thinker.spec, "right")
        token_embeds = self.language_model.embed_tokens(batch.input_ids_BT)
        embedded = embed(self._thinker, batch, token_embeds)
        visual_F = embedded.visual_mask_BT.flatten()
        rank_F = torch.where(visual_F, visual_F.long().cumsum(0) - 1, -1)
        return PromptTable(
            embeds_FH=embedded.inputs_embeds_BTH.flatten(0, 1),
            position_ids_3F=embedded.position_ids_3BT.flatten(1),
            visual_rank_F=rank_F,
            deepstack=embedded.deepstack,
            next_position_P=embedded.next_position_B,
        )

    def logits(
        self, prompts: PromptTable, token_ids_C: Tensor, position_C: Tensor, micro: MicroBatch
    ) -> Tensor:
        """Return the logits [N, V] of the micro-batch's predicted tokens.

        Args:
            prompts: From `embed_prompts`, or its leaves.
            token_ids_C: The batch's completion tokens, row after row.
            position_C: Their rotary positions, the same on all axes.
            micro: Which of them, and where.
        """
        return self.language_model.logits(self.predictors(prompts, token_ids_C, position_C, micro))

    def predictors(
        self, prompts: PromptTable, token_ids_C: Tensor, position_C: Tensor, micro: MicroBatch
    ) -> Tensor:
        """Return the hidden states [N, H] that logits and values of the predicted tokens are made of; see `logits`."""
        inputs = decoder_inputs(self.language_model, prompts, token_ids_C, position_C, micro)
        hidden_TBH = self.language_model.hidden_states(inputs)
        return hidden_TBH.flatten(0, 1)[torch.from_numpy(micro.predictor_N)]

    @contextmanager
    def replaying(self, micro: MicroBatch) -> Iterator[ReplaySession]:
        """Use the experts that the micro-batch names, if it does, in forward and backward."""
        if micro.experts_BTLK is None:
            yield ReplaySession((), 0)
            return
        experts, counted = torch.from_numpy(micro.experts_BTLK), torch.from_numpy(micro.segment_BT >= 0)
        with replay_routing(self.language_model.routers, experts, counted) as session:
            yield session

    def _load(self, model_dir: Path) -> dict[str, torch.dtype]:
        embedding = next((n for n in self._files if n.endswith("model.embed_tokens.weight")), None)
        if embedding is None:
            raise TrainingError(f"load: {model_dir} must hold a tensor model.embed_tokens.weight, got none")
        self._prefix = embedding.removesuffix("model.embed_tokens.weight")
        config = self.language_model.config
        self._name_map = NameMap(
            prefix=self._prefix,
            num_heads=config.num_attention_heads,
            num_groups=config.num_query_groups,
            head_size=config.kv_channels,
        )
        tensors = read_tensors(model_dir, self._files)
        used = self._name_map.from_checkpoint(self.language_model.named_parameters(), tensors)
        used |= {self._prefix + name for name, _ in self._tower_state()}
        unknown = sorted(set(tensors) - used)
        if unknown:
            raise TrainingError(
                f"load: {model_dir} must hold only tensors of the thinker, got {len(unknown)} others, "
                f"first {unknown[0]!r}; drop them or extend relax.train.names"
            )
        return {name: tensor.dtype for name, tensor in tensors.items()}

    def _tower_state(self) -> Iterator[tuple[str, Tensor]]:
        for tower in ("visual", "audio_tower"):
            for name, tensor in getattr(self, tower).state_dict().items():
                yield f"{tower}.{name}", tensor


def decoder_inputs(
    model: ThinkerLanguageModel,
    prompts: PromptTable,
    token_ids_C: Tensor,
    position_C: Tensor,
    micro: MicroBatch,
) -> DecoderInputs:
    """Lay a micro-batch's prompts and completions out as the decoder reads them."""
    num_flat = len(prompts.embeds_FH)
    prompt_TB = torch.from_numpy(micro.prompt_place_BT.T.copy())
    completion_TB = torch.from_numpy(micro.completion_place_BT.T.copy())
    is_completion_TB = completion_TB >= 0
    inputs_M = completion_TB[is_completion_TB]
    source_TB = prompt_TB.clamp(min=0)  # padding reads some prompt token; nothing looks at it
    source_TB[is_completion_TB] = num_flat + torch.arange(len(inputs_M))
    source = torch.cat((prompts.embeds_FH, model.embed_tokens(token_ids_C[inputs_M])))
    position_3S = torch.cat((prompts.position_ids_3F, position_C[inputs_M].expand(3, -1)), dim=1)
    places, features = _visual_places(prompts, prompt_TB)
    return DecoderInputs(
        embeds_TBH=source[source_TB],
        position_ids_3BT=position_3S[:, source_TB.T],
        hidden_B1TT=_hidden(micro),
        deepstack=features,
        visual_place_S=places,
    )


def tensor_files(model_dir: Path) -> dict[str, str]:
    """Return the safetensors file of each tensor of a model directory."""
    files = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            files.update(dict.fromkeys(opened.keys(), path.name))
    return files


def read_tensors(model_dir: Path, files: dict[str, str]) -> dict[str, Tensor]:
    """Read tensors by name, each from its file (mapped, not copied, until it is used)."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        with safe_open(model_dir / file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def _visual_places(prompts: PromptTable, prompt_TB: Tensor) -> tuple[Tensor, list[Tensor]]:
    flat = prompt_TB.flatten()
    rank = torch.where(flat >= 0, prompts.visual_rank_F[flat.clamp(min=0)], -1)
    places = (rank >= 0).nonzero()[:, 0]
    if not len(places):
        return places, []
    return places, [features[rank[places]] for features in prompts.deepstack]


def _hidden(micro: MicroBatch) -> Tensor | None:
    if micro.num_branches <= 1:
        return None
    segment = micro.segment_BT
    seen = (segment[:, None, :] == 0) | (segment[:, None, :] == segment[:, :, None])
    seen &= np.tri(segment.shape[1], dtype=bool)
    return torch.from_numpy(~seen[:, None])


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
