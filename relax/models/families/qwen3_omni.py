"""The thinker of Qwen3-Omni-MoE: pictures, films and sound, deepstack, interleaved rotary positions.

A directory holds the whole model, with names that start with `thinker.`, or the thinker alone.

Source: Qwen3-Omni-MoE in transformers 5.12; https://arxiv.org/abs/2509.17765.
"""

from __future__ import annotations

import numpy as np

from relax.models.families.base import AUDIO, VISUAL, CheckpointNames, Family


def film_times(num_patches: int, seconds: float, steps_per_second: float) -> np.ndarray:
    """Return places in proportion to time, fractions kept."""
    return np.arange(num_patches) * np.float32(seconds) * np.float32(steps_per_second)


TOWERS = {VISUAL: "visual", AUDIO: "audio_tower"}
NAMES = tuple(
    CheckpointNames(
        text=f"{prefix}model.",
        head=f"{prefix}lm_head.weight",
        towers={tower: f"{prefix}{module}." for tower, module in TOWERS.items()},
    )
    for prefix in ("thinker.", "")
)

THINKER = Family(
    model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
    hf_class="Qwen3OmniMoeThinkerForConditionalGeneration",
    tower_modules=TOWERS,
    towers=("image", "audio", "video"),
    names=NAMES,
    config_key="thinker_config",
    foreign=("talker.", "code2wav."),
    has_deepstack=True,
    film_times=film_times,
    hf_film_seconds="video_second_per_grid",
)
