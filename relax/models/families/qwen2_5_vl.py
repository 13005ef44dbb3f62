"""Qwen2.5-VL: dense, pictures and films, rotary positions in blocks, biases on queries, keys and values.

The vision tower attends in windows. Directories on the hub have `visual.` and `model.`, newer ones have both under
`model.`.

Source: Qwen2.5-VL in transformers 5.12; https://arxiv.org/abs/2502.13923. Two things there differ from the paper's
code and are followed here, so that positions agree: seconds between patches are cut to whole ones before they are
multiplied, and text goes on after a film's longer side even where the film lasts longer on the time axis.
"""

from __future__ import annotations

import numpy as np

from relax.models.families.base import VISUAL, CheckpointNames, Family


def film_times(num_patches: int, seconds: float, steps_per_second: float) -> np.ndarray:
    """Return places a whole number of seconds' steps apart."""
    return np.arange(num_patches, dtype=np.float32) * int(seconds) * np.float32(steps_per_second)


DENSE = Family(
    model_types=("qwen2_5_vl",),
    hf_class="Qwen2_5_VLForConditionalGeneration",
    text_module="model.language_model",
    tower_modules={VISUAL: "model.visual"},
    towers=("image", "video"),
    names=(
        CheckpointNames(text="model.", head="lm_head.weight", towers={VISUAL: "visual."}),
        CheckpointNames(
            text="model.language_model.", head="lm_head.weight", towers={VISUAL: "model.visual."}
        ),
    ),
    rotary="blocks",
    qk_norm=False,
    qkv_bias=True,
    film_times=film_times,
    text_follows_side=True,
    hf_film_seconds="second_per_grid_ts",
    hf_token_types=True,
)
