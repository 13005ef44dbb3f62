"""Prompts to tensors: padding, and media of all rows joined in the order in which the tokens mention them.

Pixels stay uint8 here, a quarter of the bytes; `relax.models.thinker.embed` normalises them beside the model.

Shapes: B prompts, T tokens (padded), P patches of all media, M mel bins, F frames (padded), A clips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch

from relax.models.inputs import Encoded, PromptInputs, check_prompt
from relax.models.positions import rotary_positions
from relax.models.spec import ThinkerSpec


@dataclass(kw_only=True)
class OmniBatch:
    """What a thinker's forward pass needs for some prompts; a medium that no prompt has is None."""

    input_ids_BT: torch.Tensor
    """int64."""
    attention_mask_BT: torch.Tensor
    """int64, 1 for tokens and 0 for padding."""
    position_ids_3BT: torch.Tensor
    """float32, places on the rotary axes: those of films may be fractions."""
    next_position_B: torch.Tensor
    """float32, the place of the first completion token, on all three axes."""
    pixel_values: torch.Tensor | None = None
    """uint8 [P, patch values], not normalised."""
    image_grid_thw: torch.Tensor | None = None
    """int64 [num_images, 3]."""
    pixel_values_videos: torch.Tensor | None = None
    video_grid_thw: torch.Tensor | None = None
    video_second_per_grid: torch.Tensor | None = None
    """float32 [num_videos], seconds between two temporal patches."""
    input_features: torch.Tensor | None = None
    """float32 [A, M, F]."""
    feature_attention_mask: torch.Tensor | None = None
    """int64 [A, F]."""

    def to(self, device: torch.device | str) -> OmniBatch:
        """Return the batch with its tensors on `device`."""
        moved: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            moved[item.name] = None if value is None else value.to(device)
        return OmniBatch(**moved)


def collate(
    prompts: Sequence[PromptInputs],
    spec: ThinkerSpec,
    pad: Literal["left", "right"] = "left",
    *,
    check: bool = True,
) -> OmniBatch:
    """Pad prompts to one length and join their media.

    Args:
        prompts: At least one.
        spec: The model's sizes and token ids.
        pad: Left for generation (all prompts end together), right for training.
        check: False when `check_prompt` was called on each already.

    Raises:
        PromptError: A prompt does not fit the model; the message names its place in `prompts`.
    """
    if check:
        for index, prompt in enumerate(prompts):
            check_prompt(prompt, spec, f"collate: prompt {index}")
    longest = max(len(prompt.token_ids) for prompt in prompts)
    ids = np.full((len(prompts), longest), spec.pad_token_id, np.int64)
    mask = np.zeros((len(prompts), longest), np.int64)
    # Padding has the places that transformers gives it: experts see padding too, so it decides how sums are rounded.
    is_seen = any(prompt.media.get(tower) for prompt in prompts for tower in ("image", "video"))
    positions = np.full((3, len(prompts), longest), 0.0 if is_seen else 1.0, np.float32)
    following = np.zeros(len(prompts), np.float32)
    for row, prompt in enumerate(prompts):
        num_tokens = len(prompt.token_ids)
        where = slice(longest - num_tokens, longest) if pad == "left" else slice(0, num_tokens)
        ids[row, where] = prompt.token_ids
        mask[row, where] = 1
        positions[:, row, where], following[row] = rotary_positions(prompt, spec)
    media = {
        tower: [m for prompt in prompts for m in prompt.media.get(tower, ())]
        for tower in ("image", "video", "audio")
    }
    pixel_values, image_grid_thw = _patches(media["image"])
    pixel_values_videos, video_grid_thw = _patches(media["video"])
    features, feature_mask = _features(media["audio"])
    seconds = [float(m["second_per_grid"]) for m in media["video"]]
    return OmniBatch(
        input_ids_BT=torch.from_numpy(ids),
        attention_mask_BT=torch.from_numpy(mask),
        position_ids_3BT=torch.from_numpy(positions),
        next_position_B=torch.from_numpy(following),
        pixel_values=pixel_values,
        image_grid_thw=image_grid_thw,
        pixel_values_videos=pixel_values_videos,
        video_grid_thw=video_grid_thw,
        video_second_per_grid=torch.tensor(seconds, dtype=torch.float32) if seconds else None,
        input_features=features,
        feature_attention_mask=feature_mask,
    )


def normalise_pixels(patches: torch.Tensor, spec: ThinkerSpec, dtype: torch.dtype) -> torch.Tensor:
    """Return uint8 patches [P, patch values] as the Hugging Face processor would have normalised them.

    The values of a patch are channel by channel, so mean and deviation repeat over frames and pixels.
    """
    repeats = spec.patch_values // 3
    mean = torch.tensor(spec.image_mean, device=patches.device).mul(255).repeat_interleave(repeats)
    std = torch.tensor(spec.image_std, device=patches.device).mul(255).repeat_interleave(repeats)
    return patches.float().sub_(mean).div_(std).to(dtype)


def hf_inputs(batch: OmniBatch, spec: ThinkerSpec, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the batch as keyword arguments of the Hugging Face model's own `forward` and `generate`.

    Rotary positions are left out: the model computes its own.
    """
    named = {
        "input_ids": batch.input_ids_BT,
        "attention_mask": batch.attention_mask_BT,
        "image_grid_thw": batch.image_grid_thw,
        "video_grid_thw": batch.video_grid_thw,
        "input_features": batch.input_features,
        "feature_attention_mask": batch.feature_attention_mask,
    }
    if spec.family.hf_film_seconds is not None:
        named[spec.family.hf_film_seconds] = batch.video_second_per_grid
    if spec.family.hf_token_types:
        is_image, is_video = (
            batch.input_ids_BT == each for each in (spec.image_token_id, spec.video_token_id)
        )
        named["mm_token_type_ids"] = is_image.long() + 2 * is_video.long()
    for name, patches in (
        ("pixel_values", batch.pixel_values),
        ("pixel_values_videos", batch.pixel_values_videos),
    ):
        named[name] = None if patches is None else normalise_pixels(patches, spec, dtype)
    return {name: value for name, value in named.items() if value is not None}


def _patches(media: list[Encoded]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not media:
        return None, None
    grids = np.stack([np.asarray(m["grid_thw"], np.int64) for m in media])
    return torch.from_numpy(np.concatenate([m["patches"] for m in media])), torch.from_numpy(grids)


def _features(media: list[Encoded]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not media:
        return None, None
    clips = [np.asarray(m["features"], np.float32) for m in media]
    longest = max(clip.shape[1] for clip in clips)
    features = np.zeros((len(clips), clips[0].shape[0], longest), np.float32)
    mask = np.zeros((len(clips), longest), np.int64)
    for row, clip in enumerate(clips):
        features[row, :, : clip.shape[1]] = clip
        mask[row, : clip.shape[1]] = 1
    return torch.from_numpy(features), torch.from_numpy(mask)
