"""Qwen3-VL, dense and mixture of experts: pictures and films, deepstack, interleaved rotary positions.

A film is a picture for each temporal patch, with its time in words before it; the time axis counts no seconds.
A mixture of experts keeps all experts of a layer in one tensor.

Source: Qwen3-VL in transformers 5.12; https://arxiv.org/abs/2511.21631.
"""

from __future__ import annotations

from dataclasses import replace

from relax.models.families.base import VISUAL, CheckpointNames, Family

DENSE = Family(
    model_types=("qwen3_vl",),
    hf_class="Qwen3VLForConditionalGeneration",
    text_module="model.language_model",
    tower_modules={VISUAL: "model.visual"},
    towers=("image", "video"),
    names=(
        CheckpointNames(
            text="model.language_model.", head="lm_head.weight", towers={VISUAL: "model.visual."}
        ),
    ),
    has_deepstack=True,
    hf_token_types=True,
)
MOE = replace(
    DENSE,
    model_types=("qwen3_vl_moe",),
    hf_class="Qwen3VLMoeForConditionalGeneration",
    stacked_experts=True,
)
