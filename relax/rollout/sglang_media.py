"""Encoded media and rotary positions for an SGLang server that has the plugin of tools/sglang_media. Numpy only.

The server gets the arrays that the trainer gets, so both see the same pixels, sounds and token ids; SGLang's own
processor would resize, sample and tokenise again.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import numpy as np
from safetensors.numpy import save

from modalities.profile import TOWERS
from relax.models.spec import ThinkerSpec
from relax.rollout.engine import GenerateRequest

PREFIX = "data:application/vnd.relax.encoded;base64,"
Encoded = Mapping[str, np.ndarray]


def media_fields(request: GenerateRequest, spec: ThinkerSpec) -> dict[str, list[str]]:
    """Return the media of a checked request as `image_data`, `video_data` and `audio_data`, one file for each tower."""
    present = {tower: request.media[tower] for tower in TOWERS if request.media.get(tower)}
    if not present:
        return {}
    positions = rotary_positions(request, spec)
    rotary = {
        "positions": positions,
        "delta": np.array([positions.max() + 1 - positions.shape[1]], np.int64),
    }
    fields: dict[str, list[str]] = {}
    for tower, items in present.items():
        tensors = (_sound(items) if tower == "audio" else _patches(items, spec)) | rotary
        fields[f"{tower}_data"] = [PREFIX + base64.b64encode(save(tensors)).decode()]
    return fields


def rotary_positions(request: GenerateRequest, spec: ThinkerSpec) -> np.ndarray:
    """Return the places of a prompt's tokens on the rotary axes time, height, width; int64 [3, num_prompt_tokens].

    Text and sound advance all axes by one; a picture or film starts where the text before it ended, spreads over its
    grid, and the text goes on after its largest position. SGLang's kernels take whole positions, so the fractions of
    films whose patches are not a whole number of steps apart are cut off, as SGLang itself does.

    Source: `get_rope_index` of Qwen3-Omni-MoE in transformers, sound inside films left out.
    """
    ids = request.token_ids
    kinds = {spec.image_token_id: "image", spec.video_token_id: "video"}
    waiting = {kind: iter(request.media.get(kind, ())) for kind in kinds.values()}
    positions = np.zeros((3, len(ids)), np.float64)
    following, at = 0.0, 0
    while at < len(ids):
        kind = kinds.get(int(ids[at]))
        if kind is None:
            positions[:, at] = following
            following, at = following + 1, at + 1
            continue
        places = _grid_places(next(waiting[kind]), spec)
        end = at + places.shape[1]
        positions[:, at:end] = places + following
        following, at = positions[:, at:end].max() + 1, end
    return positions.astype(np.int64)


def _grid_places(item: Encoded, spec: ThinkerSpec) -> np.ndarray:
    """Return [3, num_tokens], counted from the item's beginning."""
    merge = spec.merge_size
    frames, height, width = (int(each) for each in item["grid_thw"])
    seconds = float(item.get("second_per_grid", np.float32(1.0)))
    times = np.arange(frames) * seconds * spec.position_id_per_seconds
    grid = np.meshgrid(times, np.arange(height // merge), np.arange(width // merge), indexing="ij")
    return np.stack([axis.ravel() for axis in grid])


def _patches(items: Sequence[Encoded], spec: ThinkerSpec) -> dict[str, np.ndarray]:
    return {
        "patches": np.concatenate([item["patches"] for item in items]),
        "grid_thw": np.stack([np.asarray(item["grid_thw"], np.int64) for item in items]),
        "mean": np.array(spec.image_mean, np.float32),
        "std": np.array(spec.image_std, np.float32),
    }


def _sound(items: Sequence[Encoded]) -> dict[str, np.ndarray]:
    lengths = np.array([item["features"].shape[1] for item in items], np.int64)
    features = np.zeros((len(items), items[0]["features"].shape[0], lengths.max()), np.float32)
    for row, item in enumerate(items):
        features[row, :, : lengths[row]] = item["features"]
    return {"features": features, "num_frames": lengths}
