"""Encoded media and rotary positions for an SGLang server that has the plugin of tools/sglang_media. Numpy only.

The server gets the arrays that the trainer gets, so both see the same pixels, sounds and token ids; SGLang's own
processor would resize, sample and tokenise again.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
from safetensors.numpy import save

from modalities.profile import TOWERS
from relax.models.inputs import Encoded, PromptInputs
from relax.models.positions import rotary_positions
from relax.models.spec import ThinkerSpec
from relax.rollout.engine import GenerateRequest

PREFIX = "data:application/vnd.relax.encoded;base64,"


def media_fields(request: GenerateRequest, spec: ThinkerSpec) -> dict[str, list[str]]:
    """Return the media of a checked request as `image_data`, `video_data` and `audio_data`, one file for each tower."""
    present = {tower: request.media[tower] for tower in TOWERS if request.media.get(tower)}
    if not present:
        return {}
    positions, following = rotary_positions(PromptInputs(request.token_ids, request.media), spec)
    # SGLang's kernels take whole positions: the fractions of films whose patches are not a whole number of steps apart
    # are cut off, as SGLang itself does.
    rotary = {
        "positions": positions.astype(np.int64),
        "delta": np.array([int(following) - positions.shape[1]], np.int64),
    }
    fields: dict[str, list[str]] = {}
    for tower, items in present.items():
        tensors = (_sound(items) if tower == "audio" else _patches(items, spec)) | rotary
        fields[f"{tower}_data"] = [PREFIX + base64.b64encode(save(tensors)).decode()]
    return fields


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
