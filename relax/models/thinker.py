"""A Qwen3-Omni-MoE thinker in torch: loading it, and prompts to embeddings with the towers run once a prompt.

It is not the sampler (`relax.rollout.torch_engine`) nor the trainer (`relax.train`); both build on `embed`:
tokens are looked up, the towers' outputs are spliced over their placeholders, and the language model (the
Hugging Face one, or the trainer's own) continues from there.

Shapes: B prompts, T tokens, H hidden size, V vocabulary, 3 rotary axes (time, height, width).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.utils import logging as hf_logging

from modalities.base import num_audio_tokens
from relax.models.batch import OmniBatch, collate, normalise_pixels
from relax.models.errors import CheckpointError
from relax.models.inputs import PromptInputs, check_prompt
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
    "train_towers",
]

CHECKPOINT_PREFIX = "thinker."
TOWER_PREFIXES = ("thinker.visual.", "thinker.audio_tower.")


@dataclass(frozen=True)
class Thinker:
    """A loaded thinker: the Hugging Face module and what must be known of it."""

    hf: Any
    """`Qwen3OmniMoeThinkerForConditionalGeneration`, in evaluation mode (it has no dropout)."""
    spec: ThinkerSpec
    model_dir: Path

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.hf.lm_head.weight.device


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


def load_thinker(
    model_dir: Path | str, dtype: torch.dtype = torch.float32, *, device: torch.device | str = "cpu"
) -> Thinker:
    """Load a thinker from a directory with the layout of Qwen3-Omni (names start with `thinker.`).

    Nothing is fetched from the network.

    Raises:
        CheckpointError: The directory lacks a file, a tensor of the thinker, or has one of another shape.
    """
    where = Path(model_dir)
    spec = ThinkerSpec.from_pretrained(where)
    showed_progress = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        loaded: Any = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
            where, dtype=dtype, local_files_only=True, output_loading_info=True
        )
        hf, info = loaded
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"load_thinker: {where} must hold the thinker's tensors, got {error}"
        ) from error
    finally:
        if showed_progress:
            hf_logging.enable_progress_bar()
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise CheckpointError(
            f"load_thinker: {where} must hold every tensor of the thinker, "
            f"lacks {len(names)}, first {names[0]}"
        )
    return Thinker(hf=hf.eval().to(device), spec=spec, model_dir=where)


def train_towers(thinker: Thinker, trained: bool) -> None:
    """Train or freeze the image, video and audio towers; with frozen ones `embed` keeps no graph of them."""
    for tower in (thinker.hf.visual, thinker.hf.audio_tower):
        tower.requires_grad_(trained)


def checkpoint_views(thinker: Thinker) -> dict[str, torch.Tensor]:
    """Return the weights under the names of the checkpoint, as views: writing into one changes the model.

    The module keeps all experts of a layer in one tensor; the checkpoint has a tensor for each of their matrices.
    """
    views: dict[str, torch.Tensor] = {}
    for name, parameter in thinker.hf.state_dict(keep_vars=True).items():
        value = parameter.detach()
        stem, _, kind = name.rpartition(".")
        if kind == "gate_up_proj" and stem.endswith("experts"):
            for expert, matrix in enumerate(value):
                gate, up = matrix.chunk(2)
                views[f"{CHECKPOINT_PREFIX}{stem}.{expert}.gate_proj.weight"] = gate
                views[f"{CHECKPOINT_PREFIX}{stem}.{expert}.up_proj.weight"] = up
        elif kind == "down_proj" and stem.endswith("experts"):
            for expert, matrix in enumerate(value):
                views[f"{CHECKPOINT_PREFIX}{stem}.{expert}.down_proj.weight"] = matrix
        else:
            views[CHECKPOINT_PREFIX + name] = value
    return views


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
    position_ids_3BT, next_position_B = _positions(thinker, batch)
    return Embedded(embeds_BTH, position_ids_3BT, next_position_B, visual_mask_BT, deepstack)


def language_model(
    thinker: Thinker, embedded: Embedded, attention_mask_BT: torch.Tensor, past_key_values: Any = None
) -> torch.Tensor:
    """Run the thinker's own language model over embedded prompts; return its last hidden states [B, T, H]."""
    return thinker.hf.model(
        inputs_embeds=embedded.inputs_embeds_BTH,
        attention_mask=attention_mask_BT,
        position_ids=embedded.position_ids_3BT,
        past_key_values=past_key_values,
        use_cache=past_key_values is not None,
        visual_pos_masks=embedded.visual_mask_BT if embedded.deepstack else None,
        deepstack_visual_embeds=embedded.deepstack or None,
    ).last_hidden_state


def _visual_embeds(
    thinker: Thinker, batch: OmniBatch, is_image_N: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return embeddings and deepstack features of all visual tokens, in token order, by one tower call."""
    visual = thinker.hf.visual
    parts = [p for p in (batch.pixel_values, batch.pixel_values_videos) if p is not None]
    grids = [g for g in (batch.image_grid_thw, batch.video_grid_thw) if g is not None]
    pixels = normalise_pixels(torch.cat(parts), thinker.spec, visual.patch_embed.proj.weight.dtype)
    out = visual(pixels, grid_thw=torch.cat(grids))
    if len(parts) == 1:
        return out.pooler_output, list(out.deepstack_features)
    # The tower saw images first, then films; the tokens may mix them: rank within the kind gives the place.
    image_rank, video_rank = is_image_N.long().cumsum(0), (~is_image_N).long().cumsum(0)
    order_N = torch.where(is_image_N, image_rank - 1, is_image_N.sum() + video_rank - 1)
    return out.pooler_output[order_N], [features[order_N] for features in out.deepstack_features]


def _audio_embeds(thinker: Thinker, batch: OmniBatch) -> torch.Tensor:
    """Return the audio tokens' embeddings [num_audio_tokens, H], clip after clip.

    The tower pads the last 100-frame chunk of every clip to the longest chunk of the call and convolves then,
    which leaks the neighbours' length into short clips (transformers 5.12). Clips of one padded length go
    through the tower together, so that the result does not depend on the batch.
    """
    tower, features, mask = thinker.hf.audio_tower, batch.input_features, batch.feature_attention_mask
    if features is None or mask is None:
        raise CheckpointError("embed: the batch must have features and their mask; build it with collate")
    chunk = 2 * tower.n_window
    lengths = mask.sum(-1)
    padded = lengths.clamp(max=chunk)
    kinds = padded.unique().tolist()
    rows: list[torch.Tensor] = []
    clips: list[int] = []
    for kind in kinds:
        chosen = (padded == kind).nonzero()[:, 0]
        frames = features[chosen].permute(0, 2, 1)[mask[chosen].bool()].T.to(tower.conv_out.weight.dtype)
        out = tower(frames, feature_lens=lengths[chosen]).last_hidden_state
        if len(kinds) == 1:
            return out
        rows += out.split([num_audio_tokens(n) for n in lengths[chosen].tolist()])
        clips += chosen.tolist()
    by_clip = dict(zip(clips, rows, strict=True))
    return torch.cat([by_clip[clip] for clip in range(len(by_clip))])


def _positions(thinker: Thinker, batch: OmniBatch) -> tuple[torch.Tensor, torch.Tensor]:
    mask_BT = batch.attention_mask_BT
    frames = None if batch.feature_attention_mask is None else batch.feature_attention_mask.sum(-1)
    positions_3BT, _ = thinker.hf.get_rope_index(
        batch.input_ids_BT,
        batch.image_grid_thw,
        batch.video_grid_thw,
        mask_BT,
        use_audio_in_video=False,
        audio_seqlens=frames,
        second_per_grids=batch.video_second_per_grid,
    )
    positions_3BT = positions_3BT.float()
    next_B = positions_3BT.masked_fill(mask_BT[None] == 0, -1.0).amax((0, 2)) + 1
    return positions_3BT, next_B
