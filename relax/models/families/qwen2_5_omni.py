"""The thinker of Qwen2.5-Omni: dense, pictures, films and sound, rotary positions in blocks (TMRoPE).

Queries, keys and values have biases and no norms. The vision tower attends in windows. A directory holds the whole
model, with names that start with `thinker.`, or the thinker alone. Sound inside films is not interleaved with them.

Source: Qwen2.5-Omni in transformers 5.12; https://arxiv.org/abs/2503.20215.
"""

from __future__ import annotations

import numpy as np

from relax.models.families.base import Family
from relax.models.families.qwen3_omni import NAMES, TOWERS


def film_times(num_patches: int, seconds: float, steps_per_second: float) -> np.ndarray:
    """Return places in proportion to time, fractions cut off."""
    return np.trunc(np.arange(num_patches) * np.float32(seconds) * np.float32(steps_per_second))


THINKER = Family(
    model_types=("qwen2_5_omni", "qwen2_5_omni_thinker"),
    hf_class="Qwen2_5OmniThinkerForConditionalGeneration",
    tower_modules=TOWERS,
    towers=("image", "audio", "video"),
    names=NAMES,
    config_key="thinker_config",
    foreign=("talker.", "token2wav."),
    rotary="blocks",
    qk_norm=False,
    qkv_bias=True,
    film_times=film_times,
    hf_film_seconds="video_second_per_grid",
)
