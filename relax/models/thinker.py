"""Prompts to embeddings with the towers run once a prompt, and on through the language model, for every family.

It is not the sampler (`relax.rollout.torch_engine`) nor the trainer (`relax.train`); both build on `embed`:
tokens are looked up, the towers' outputs are spliced over their placeholders, and the language model (the
Hugging Face one, or the trainer's own) continues from there.

Shapes: B prompts, T tokens, H hidden size, V vocabulary, 3 rotary axes (time, height, width).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from modalities.base import num_audio_tokens
from relax.models.batch import OmniBatch, collate, normalise_pixels
from relax.models.errors import CheckpointError
from relax.models.inputs import PromptInputs, check_prompt
from relax.models.loading import Thinker, checkpoint_views, load_thinker, load_towers
from relax.models.spec import ThinkerSpec

__all__ = [
    "Embedded",
    "OmniBatch",
    "PromptInputs",
    "Thinker",
    "ThinkerSpec",
    "check_prompt",
    "checkpoint_views",
    "collate",
    "embed",
    "language_model",
    "load_thinker",
    "load_towers",
    "train_towers",
]


class Embedded(NamedTuple):
    """Prompts ready for a language model. Gradients reach the towers unless they are frozen."""

    inputs_embeds_BTH: torch.Tensor
    position_ids_3BT: torch.Tensor
    """float32: time positions of films may be fractions."""
    next_position_B: torch.Tensor
    """float32: the position of the first completion token, on all three axes."""
    visual_mask_BT: torch.Tensor
    """bool: where image and video tokens are."""
    deepstack: list[torch.Tensor]
    """For each of the first language layers, what it adds at the visual tokens: [num_visual_tokens, H]."""


def train_towers(thinker: Thinker, trained: bool) -> None:
    """Train or freeze the image, video and audio towers; with frozen ones `embed` keeps no graph of them."""
    for tower in thinker.towers.values():
        tower.requires_grad_(trained)


def embed(thinker: Thinker, batch: OmniBatch, token_embeds_BTH: torch.Tensor | None = None) -> Embedded:
    """Run the towers once for each medium and splice their outputs into the token embeddings.

    Each clip's features are what they would be were it alone in the batch (see `_audio_embeds`).

    Args:
        thinker: Its towers, positions and, unless given, its token embedding are used.
        batch: From `collate`, on the thinker's device.
        token_embeds_BTH: Embeddings of `batch.input_ids_BT` by another language model than the thinker's own.
    """
    ids_BT = batch.input_ids_BT
    embeds_BTH = thinker.hf.get_input_embeddings()(ids_BT) if token_embeds_BTH is None else token_embeds_BTH
    image_mask_BT = ids_BT == thinker.spec.image_token_id
    visual_mask_BT = image_mask_BT | (ids_BT == thinker.spec.video_token_id)
    deepstack: list[torch.Tensor] = []
    if batch.input_features is not None:
        audio_mask_BT = ids_BT == thinker.spec.audio_token_id
        audio = _audio_embeds(thinker, batch).to(embeds_BTH.dtype)
        embeds_BTH = embeds_BTH.masked_scatter(audio_mask_BT[..., None], audio)
    if batch.pixel_values is not None or batch.pixel_values_videos is not None:
        visual, deepstack = _visual_embeds(thinker, batch, image_mask_BT[visual_mask_BT])
        embeds_BTH = embeds_BTH.masked_scatter(visual_mask_BT[..., None], visual.to(embeds_BTH.dtype))
    return Embedded(embeds_BTH, batch.position_ids_3BT, batch.next_position_B, visual_mask_BT, deepstack)


def language_model(
    thinker: Thinker, embedded: Embedded, attention_mask_BT: torch.Tensor, past_key_values: Any = None
) -> torch.Tensor:
    """Run the thinker's own language model over embedded prompts; return its last hidden states [B, T, H]."""
    deepstack: dict[str, Any] = {}
    if embedded.deepstack:
        deepstack = {
            "visual_pos_masks": embedded.visual_mask_BT,
            "deepstack_visual_embeds": embedded.deepstack,
        }
    positions = embedded.position_ids_3BT if thinker.spec.family.towers else embedded.position_ids_3BT[0]
    return thinker.text(
        inputs_embeds=embedded.inputs_embeds_BTH,
        attention_mask=attention_mask_BT,
        position_ids=positions,
        past_key_values=past_key_values,
        use_cache=past_key_values is not None,
        **deepstack,
    ).last_hidden_state


def _visual_embeds(
    thinker: Thinker, batch: OmniBatch, is_image_N: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return embeddings and deepstack features of all visual tokens, in token order, by one tower call."""
    visual = thinker.visual
    parts = [p for p in (batch.pixel_values, batch.pixel_values_videos) if p is not None]
    grids = [g for g in (batch.image_grid_thw, batch.video_grid_thw) if g is not None]
    pixels = normalise_pixels(torch.cat(parts), thinker.spec, visual.patch_embed.proj.weight.dtype)
    out = visual(pixels, grid_thw=torch.cat(grids))
    deepstack = list(out.deepstack_features) if thinker.spec.num_deepstack else []
    if len(parts) == 1:
        return out.pooler_output, deepstack
    # The tower saw images first, then films; the tokens may mix them: rank within the kind gives the place.
    image_rank, video_rank = is_image_N.long().cumsum(0), (~is_image_N).long().cumsum(0)
    order_N = torch.where(is_image_N, image_rank - 1, is_image_N.sum() + video_rank - 1)
    return out.pooler_output[order_N], [features[order_N] for features in deepstack]


def _audio_embeds(thinker: Thinker, batch: OmniBatch) -> torch.Tensor:
    """Return the audio tokens' embeddings [num_audio_tokens, H], clip after clip.

    Qwen3-Omni's tower pads the last 100-frame chunk of every clip to the longest chunk of the call and convolves
    then, which leaks the neighbours' length into short clips (transformers 5.12). Clips of one padded length go
    through the tower together, so that the result does not depend on the batch.
    """
    tower, features, mask = thinker.audio_tower, batch.input_features, batch.feature_attention_mask
    if features is None or mask is None:
        raise CheckpointError("embed: the batch must have features and their mask; build it with collate")
    chunk, dtype = 2 * tower.n_window, next(tower.parameters()).dtype
    lengths = mask.sum(-1)
    padded = lengths.clamp(max=chunk)
    kinds = padded.unique().tolist()
    rows: list[torch.Tensor] = []
    clips: list[int] = []
    for kind in kinds:
        chosen = (padded == kind).nonzero()[:, 0]
        frames = features[chosen].permute(0, 2, 1)[mask[chosen].bool()].T.to(dtype)
        out = tower(frames, feature_lens=lengths[chosen]).last_hidden_state
        if len(kinds) == 1:
            return out
        rows += out.split([num_audio_tokens(n, thinker.spec.audio_rule) for n in lengths[chosen].tolist()])
        clips += chosen.tolist()
    by_clip = dict(zip(clips, rows, strict=True))
    return torch.cat([by_clip[clip] for clip in range(len(by_clip))])
