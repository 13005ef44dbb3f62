"""Micro-batches as the decoder reads them on one rank: embeddings, positions, masks, experts, and what it predicts.

With context parallel a rank lays out its own tokens of each sequence alone; with sequence parallel the decoder
shares them out further by itself (`relax.train.language_model`).

Shapes: T tokens of a sequence (padded), Q of them on this rank, B sequences, N predicted tokens, C completion tokens
of the batch, F flat prompt places, S visual tokens, H hidden size, L layers with experts of this rank, K experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relax.train.attention import Document, Documents, local_tokens
from relax.train.batch import MicroBatch
from relax.train.language_model import DecoderInputs
from relax.train.ranks import World


@dataclass(frozen=True, kw_only=True)
class PromptTable:
    """Embedded prompts of a batch, flat, from which micro-batches pick.

    Only the first pipeline stage has embeddings; positions are on all.
    """

    embeds_FH: Tensor | None
    position_ids_3F: Tensor
    visual_rank_F: Tensor
    """Index of a visual token's features in `deepstack`; -1 for other tokens."""
    deepstack: list[Tensor]
    """[S, H] for each of the first layers."""
    next_position_P: Tensor

    def leaves(self) -> PromptTable:
        """Return a copy cut from the graph, whose gradients gather over micro-batches."""
        return PromptTable(
            embeds_FH=None if self.embeds_FH is None else _leaf(self.embeds_FH),
            position_ids_3F=self.position_ids_3F,
            visual_rank_F=self.visual_rank_F,
            deepstack=[_leaf(features) for features in self.deepstack],
            next_position_P=self.next_position_P,
        )

    def backward(self, leaves: PromptTable) -> None:
        """Send the gradients that gathered in `leaves` on through the towers and the token embedding."""
        if self.embeds_FH is None or leaves.embeds_FH is None:
            return
        pairs = [
            (ours, leaf.grad)
            for ours, leaf in zip(
                (self.embeds_FH, *self.deepstack), (leaves.embeds_FH, *leaves.deepstack), strict=True
            )
            if ours.requires_grad and leaf.grad is not None
        ]
        torch.autograd.backward([ours for ours, _ in pairs], [grad for _, grad in pairs])


@dataclass(frozen=True, kw_only=True)
class Completions:
    """The batch's completion tokens and their rotary positions (the same on all axes), row after row."""

    token_ids_C: Tensor
    position_C: Tensor


@dataclass(frozen=True)
class Predicted:
    """Which completion tokens this rank predicts, and from where.

    place_N: in the flattened [Q * B] of this rank. target_N: of this rank, in the batch's completions. counts: how
    many each context parallel rank predicts. all_target_N: those of all of them, rank after rank.
    """

    place_N: Tensor
    target_N: Tensor
    counts: list[int]
    all_target_N: Tensor


def lay_out(
    embed_tokens: Callable[[Tensor], Tensor],
    prompts: PromptTable,
    completions: Completions,
    micro: MicroBatch,
    world: World,
) -> DecoderInputs:
    """Return a micro-batch as the decoder of this rank reads it; without embeddings past the first stage."""
    device, own_Q = world.device, _own_tokens(micro, world)
    prompt_QB = torch.from_numpy(micro.prompt_place_BT.T[own_Q]).to(device)
    completion_QB = torch.from_numpy(micro.completion_place_BT.T[own_Q]).to(device)
    is_completion_QB = completion_QB >= 0
    inputs_M = completion_QB[is_completion_QB]
    source_QB = prompt_QB.clamp(min=0)  # padding reads some prompt token; nothing looks at it
    source_QB[is_completion_QB] = prompts.position_ids_3F.shape[1] + torch.arange(
        len(inputs_M), device=device
    )
    position_3S = torch.cat((prompts.position_ids_3F, completions.position_C[inputs_M].expand(3, -1)), dim=1)
    embeds_QBH, places = None, torch.empty(0, dtype=torch.long, device=device)
    features: list[Tensor] = []
    if prompts.embeds_FH is not None:
        source = torch.cat((prompts.embeds_FH, embed_tokens(completions.token_ids_C[inputs_M])))
        embeds_QBH = source[source_QB]
        places, features = _visual_places(prompts, prompt_QB)
    hidden, documents = _masks(micro, own_Q, world)
    return DecoderInputs(
        embeds_TBH=embeds_QBH,
        position_ids_3BT=position_3S[:, source_QB.T],
        hidden_B1TT=hidden,
        documents=documents,
        deepstack=features,
        visual_place_S=places,
        shape=tuple(source_QB.shape),
    )


def predicted(micro: MicroBatch, world: World) -> Predicted:
    """Return what this rank predicts of a micro-batch."""
    ranks, num_lines = world.layout.cp, len(micro.segment_BT)
    token_N, line_N = np.divmod(micro.predictor_N, num_lines)
    places, targets = [], []
    for rank in range(ranks):
        own_Q = local_tokens(micro.segment_BT.shape[1], ranks, rank).numpy()
        where_T = np.full(micro.segment_BT.shape[1], -1, np.int64)
        where_T[own_Q] = np.arange(len(own_Q))
        mine_N = where_T[token_N] >= 0
        places.append(where_T[token_N[mine_N]] * num_lines + line_N[mine_N])
        targets.append(micro.target_N[mine_N])
    own = world.place.cp_rank
    return Predicted(
        place_N=torch.from_numpy(places[own]).to(world.device),
        target_N=torch.from_numpy(targets[own]).to(world.device),
        counts=[len(each) for each in targets],
        all_target_N=torch.from_numpy(np.concatenate(targets)).to(world.device),
    )


def routed(micro: MicroBatch, world: World) -> tuple[Tensor, Tensor]:
    """Return the experts [N, L, K], int64, and the tokens that count [N], as the routers of this rank see them.

    Megatron-core flattens [T, B], sequence first. Sequence parallel ranks have one piece of the sequence each.
    """
    if micro.experts_BTLK is None:
        raise ValueError("routed: the micro-batch must have experts, got none")
    own_Q = _own_tokens(micro, world)
    if world.layout.splits_norms:
        own_Q = np.split(own_Q, world.layout.tp)[world.place.tp_rank]
    experts_NLK = micro.experts_BTLK[:, own_Q].swapaxes(0, 1).reshape(-1, *micro.experts_BTLK.shape[2:])
    small_NLK = torch.from_numpy(experts_NLK).to(world.device)
    counted_N = (micro.segment_BT[:, own_Q] >= 0).T.reshape(-1)
    return small_NLK.long(), torch.from_numpy(counted_N).to(world.device)


def _own_tokens(micro: MicroBatch, world: World) -> np.ndarray:
    return local_tokens(micro.segment_BT.shape[1], world.layout.cp, world.place.cp_rank).numpy()


def _visual_places(prompts: PromptTable, prompt_QB: Tensor) -> tuple[Tensor, list[Tensor]]:
    flat = prompt_QB.flatten()
    rank = torch.where(flat >= 0, prompts.visual_rank_F[flat.clamp(min=0)], -1)
    places = (rank >= 0).nonzero()[:, 0]
    if not len(places):
        return places, []
    return places, [features[rank[places]] for features in prompts.deepstack]


def _masks(micro: MicroBatch, own_Q: np.ndarray, world: World) -> tuple[Tensor | None, Documents | None]:
    """Return the mask of padded sequences, or the documents of packed ones; causal order needs no mask."""
    masked = micro.num_branches > 1 or world.layout.cp > 1
    if not micro.bounds:
        return (_hidden(micro.segment_BT, own_Q).to(world.device)[:, None] if masked else None), None
    parts = []
    for start, end in zip(micro.bounds, micro.bounds[1:], strict=False):
        if not masked:
            parts.append(Document(slice(start, end), slice(start, end), None))
            continue
        queries = np.flatnonzero((own_Q >= start) & (own_Q < end))
        if len(queries):
            hidden_1QT = _hidden(micro.segment_BT[:, start:end], own_Q[queries] - start)
            places = torch.from_numpy(queries).to(world.device)
            parts.append(Document(places, slice(start, end), hidden_1QT[0].to(world.device)))
    return None, Documents(parts)


def _hidden(segment_BT: np.ndarray, own_Q: np.ndarray) -> Tensor:
    """Return what the own tokens must not see, [B, Q, T]: later tokens and other branches."""
    seen = (segment_BT[:, None, :] == 0) | (segment_BT[:, None, :] == segment_BT[:, own_Q, None])
    seen &= np.arange(segment_BT.shape[1]) <= own_Q[:, None]
    return torch.from_numpy(~seen)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
