"""One prompt as numbers: token ids and encoded media, and the check that they fit a thinker. Numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from modalities.base import num_audio_tokens
from modalities.profile import TOWERS
from relax.models.errors import PromptError
from relax.models.spec import ThinkerSpec

Encoded = Mapping[str, np.ndarray]
"""What a modality's `encode` returns for one picture, clip or film; see `modalities.base`."""


@dataclass(frozen=True)
class PromptInputs:
    """A prompt with its placeholders already expanded.

    `token_ids` is int32 [num_tokens]; `media` holds, for each tower, the encoded media in the order in which
    the prompt mentions them (a tower without media may be absent).
    """

    token_ids: np.ndarray
    media: Mapping[str, Sequence[Encoded]] = field(default_factory=dict)


def check_prompt(prompt: PromptInputs, spec: ThinkerSpec, where: str = "prompt") -> None:
    """Refuse a prompt that the model would crash on or silently misread.

    Args:
        prompt: The prompt to look at; it is not changed.
        spec: The model's sizes and token ids.
        where: Names the prompt in the error.

    Raises:
        PromptError: The ids are not a non-empty row of integers within the vocabulary and the positions.
        PromptError: A medium has the wrong keys, shape, type or a value that is not finite.
        PromptError: The runs of placeholder tokens are not as many and as long as the media need.
    """
    ids = np.asarray(prompt.token_ids)
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise PromptError(
            f"{where}: token_ids must be a non-empty row of integers, got shape {ids.shape} of {ids.dtype}"
        )
    if len(ids) > spec.max_positions:
        raise PromptError(
            f"{where}: token_ids must be at most {spec.max_positions} long (the model's positions), "
            f"got {len(ids)}; shorten the prompt or its media"
        )
    outside = ids[(ids < 0) | (ids >= spec.vocab_size)]
    if len(outside):
        raise PromptError(f"{where}: token_ids must be in [0, {spec.vocab_size}), got {int(outside[0])}")
    unknown = [tower for tower in prompt.media if tower not in TOWERS]
    if unknown:
        raise PromptError(f"{where}: media must be of the towers {list(TOWERS)}, got {sorted(unknown)}")
    for tower in TOWERS:
        media = prompt.media.get(tower, ())
        if tower not in spec.family.towers:
            if media:
                raise PromptError(
                    f"{where}: media must be of the towers of a {spec.family.name}, "
                    f"{list(spec.family.towers)}, got {len(media)} of {tower!r}"
                )
            continue
        counts = [count for medium in media for count in _num_tokens(tower, medium, spec, where)]
        _check_runs(ids, tower, counts, spec, where)


def _num_tokens(tower: str, medium: Encoded, spec: ThinkerSpec, where: str) -> list[int]:
    """Return the lengths of the medium's runs of placeholders."""
    if tower == "audio":
        features = _value(medium, "features", tower, where)
        if features.ndim != 2 or features.shape[0] != spec.num_mel_bins or not features.shape[1]:
            raise PromptError(
                f"{where}: audio features must be [{spec.num_mel_bins}, num_frames], "
                f"got {list(features.shape)}"
            )
        if not np.isfinite(features).all():
            raise PromptError(f"{where}: audio features must be finite, got a value that is not")
        return [num_audio_tokens(features.shape[1], spec.audio_rule)]
    patches, grid = _value(medium, "patches", tower, where), _value(medium, "grid_thw", tower, where)
    merge = spec.merge_size
    if grid.shape != (3,) or (grid <= 0).any() or grid[1] % merge or grid[2] % merge:
        raise PromptError(
            f"{where}: {tower} grid_thw must be three positive numbers, height and width divisible "
            f"by {merge}, got {grid.tolist()}"
        )
    expected = (int(grid.prod()), spec.patch_values)
    if patches.shape != expected or patches.dtype != np.uint8:
        raise PromptError(
            f"{where}: {tower} patches must be uint8 {list(expected)} for grid {grid.tolist()}, "
            f"got {patches.dtype} {list(patches.shape)}"
        )
    if tower == "video":
        seconds = float(_value(medium, "second_per_grid", tower, where))
        if not np.isfinite(seconds) or seconds < 0:
            raise PromptError(
                f"{where}: video second_per_grid must be finite and not negative, got {seconds}"
            )
        if spec.family.film_in_frames:
            return [expected[0] // merge**2 // int(grid[0])] * int(grid[0])
    return [expected[0] // merge**2]


def _value(medium: Encoded, key: str, tower: str, where: str) -> np.ndarray:
    if key not in medium:
        raise PromptError(f"{where}: {tower} media must have {key!r}, got {sorted(medium)}")
    return np.asarray(medium[key])


def _check_runs(ids: np.ndarray, tower: str, counts: list[int], spec: ThinkerSpec, where: str) -> None:
    pad = {"image": spec.image_token_id, "audio": spec.audio_token_id, "video": spec.video_token_id}[tower]
    start = spec.audio_start_token_id if tower == "audio" else spec.vision_start_token_id
    is_pad = np.concatenate(([False], ids == pad, [False]))
    begins = np.flatnonzero(is_pad[1:] & ~is_pad[:-1])
    ends = np.flatnonzero(is_pad[:-1] & ~is_pad[1:])
    lengths = (ends - begins).tolist()
    if lengths != counts:
        raise PromptError(
            f"{where}: runs of the {tower} placeholder token {pad} must be {counts} long for its media, "
            f"got {lengths}"
        )
    if len(begins) and (begins[0] == 0 or (ids[begins - 1] != start).any()):
        raise PromptError(f"{where}: every run of {tower} placeholders must follow the start token {start}")
