"""Sizes of published checkpoints as we know them; what decides no count is left out.

Entered by hand; `tools/model_memory.py` on a directory's own config.json has the last word.
Source: config.json of each repository on the Hugging Face hub. What a vision or audio tower does not name here is the
default of its class in transformers 5.12.
"""

from __future__ import annotations

from typing import Any


def _text(
    hidden: int, width: int, layers: int, heads: int, groups: int, vocabulary: int = 151_936
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32_768,
        "eos_token_id": 151_645,
    }


HEAD = {"head_dim": 128}
A3B = _text(2048, 6144, 48, 32, 4) | HEAD
A3B |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
SMALL_VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "deepstack_visual_indexes": [5, 11, 17],
}
LARGE_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "deepstack_visual_indexes": [8, 16, 24],
}
QWEN3_VISION = {"num_heads": 16, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
QWEN3_VISION |= {"num_position_embeddings": 2304}
WINDOW_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
}
WINDOW_VISION |= {"temporal_patch_size": 2, "spatial_merge_size": 2}
AUDIO = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
AUDIO |= {"num_mel_bins": 128}
VISUAL_TOKENS = {"image_token_id": 151_655, "video_token_id": 151_656, "vision_start_token_id": 151_652}
QWEN3_OMNI_TOKENS = VISUAL_TOKENS | {"audio_token_id": 151_675, "audio_start_token_id": 151_669}
QWEN2_5_OMNI_TOKENS = VISUAL_TOKENS | {"audio_token_id": 151_646, "audio_start_token_id": 151_647}


def _visual(text: dict[str, Any], vision: dict[str, Any], **more: Any) -> dict[str, Any]:
    vision = vision | {"out_hidden_size": text["hidden_size"]}
    return {"text_config": text, "vision_config": vision, **VISUAL_TOKENS, **more}


def _omni(
    family: str, text: dict[str, Any], vision: dict[str, Any], tokens: dict[str, int], **audio: Any
) -> tuple[str, dict[str, Any]]:
    heard = AUDIO | {"output_dim": text["hidden_size"]} | audio
    thinker = {"model_type": f"{family}_thinker", **_visual(text, vision), "audio_config": heard, **tokens}
    return family, {"thinker_config": thinker}


PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-0.6B": ("qwen3", _text(1024, 3072, 28, 16, 8) | HEAD | {"tie_word_embeddings": True}),
    "Qwen/Qwen3-1.7B": ("qwen3", _text(2048, 6144, 28, 16, 8) | HEAD | {"tie_word_embeddings": True}),
    "Qwen/Qwen3-4B": ("qwen3", _text(2560, 9728, 36, 32, 8) | HEAD | {"tie_word_embeddings": True}),
    "Qwen/Qwen3-8B": ("qwen3", _text(4096, 12_288, 36, 32, 8) | HEAD),
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", A3B),
    "Qwen/Qwen3-VL-2B-Instruct": (
        "qwen3_vl",
        _visual(_text(2048, 6144, 28, 16, 8) | HEAD, QWEN3_VISION | SMALL_VISION, tie_word_embeddings=True),
    ),
    "Qwen/Qwen3-VL-4B-Instruct": (
        "qwen3_vl",
        _visual(_text(2560, 9728, 36, 32, 8) | HEAD, QWEN3_VISION | SMALL_VISION, tie_word_embeddings=True),
    ),
    "Qwen/Qwen3-VL-8B-Instruct": (
        "qwen3_vl",
        _visual(_text(4096, 12_288, 36, 32, 8) | HEAD, QWEN3_VISION | LARGE_VISION),
    ),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": ("qwen3_vl_moe", _visual(A3B, QWEN3_VISION | LARGE_VISION)),
    "Qwen/Qwen2.5-VL-3B-Instruct": (
        "qwen2_5_vl",
        _visual(_text(2048, 11_008, 36, 16, 2), WINDOW_VISION, tie_word_embeddings=True),
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": (
        "qwen2_5_vl",
        _visual(_text(3584, 18_944, 28, 28, 4, 152_064), WINDOW_VISION),
    ),
    "Qwen/Qwen2.5-Omni-7B": _omni(
        "qwen2_5_omni", _text(3584, 18_944, 28, 28, 4, 152_064), WINDOW_VISION, QWEN2_5_OMNI_TOKENS
    ),
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": _omni(
        "qwen3_omni_moe",
        A3B | {"vocab_size": 152_064},
        QWEN3_VISION | LARGE_VISION,
        QWEN3_OMNI_TOKENS,
        downsample_hidden_size=480,
    ),
}
"""By name on the hub: `model_type`, and the rest of config.json."""
