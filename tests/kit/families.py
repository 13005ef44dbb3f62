"""Tiny models of every family on disk, with random weights, as transformers writes them, and a tokenizer of few words.

The tokenizer knows no more of a model than that its vocabulary is large enough.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from transformers.utils import logging as hf_logging

from tests.kit.media import write_model_dir

TEXT: dict[str, Any] = {
    "vocab_size": 511,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
INTERLEAVED = ROPE | {"mrope_interleaved": True}
VISION = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8}
VISION |= {"out_hidden_size": 32, "initializer_range": 0.2}
DEEPSTACK = VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
WINDOWS = VISION | {"window_size": 32, "fullatt_block_indexes": [1]}
AUDIO = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
AUDIO |= {"num_mel_bins": 32, "output_dim": 32, "initializer_range": 0.2}
TOKENS = {
    "image_token_id": 500,
    "audio_token_id": 501,
    "video_token_id": 502,
    "vision_start_token_id": 503,
    "vision_end_token_id": 504,
    "audio_start_token_id": 505,
    "audio_end_token_id": 506,
    "user_token_id": 5,
}
NAMED = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "audio_token_id": "<|audio_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "audio_start_token_id": "<|audio_start|>",
    "audio_end_token_id": "<|audio_end|>",
}
TEXT_TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As text models have it: a message's content is a text, never a list."""
PROCESSOR = {
    "size": {"shortest_edge": 1024, "longest_edge": 4096},
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.3, 0.25, 0.2],
    "patch_size": 8,
    "feature_size": 32,
}
OLD_TEXT = {key: value for key, value in TEXT.items() if key != "head_dim"} | {"hidden_size": 64}
"""Qwen2.5 has no head size of its own."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", TEXT),
    "qwen3_moe": ("Qwen3Moe", TEXT | MOE | {"norm_topk_prob": True}),
    "qwen3_vl": (
        "Qwen3VL",
        {"text_config": TEXT | {"rope_parameters": INTERLEAVED}, "vision_config": DEEPSTACK, **TOKENS},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {"text_config": TEXT | MOE | {"rope_parameters": INTERLEAVED}, "vision_config": DEEPSTACK, **TOKENS},
    ),
    "qwen3_omni_moe": (
        "Qwen3OmniMoeThinker",
        {
            "text_config": TEXT | MOE | {"rope_parameters": INTERLEAVED},
            "vision_config": DEEPSTACK,
            "audio_config": AUDIO | {"n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 8},
            **TOKENS,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            "text_config": OLD_TEXT | {"rope_parameters": ROPE},
            "vision_config": WINDOWS | {"out_hidden_size": 64, "tokens_per_second": 2},
            **TOKENS,
        },
    ),
    "qwen2_5_omni": (
        "Qwen2_5OmniThinker",
        {
            "text_config": OLD_TEXT | {"rope_parameters": ROPE},
            "vision_config": WINDOWS | {"out_hidden_size": 64},
            "audio_config": AUDIO | {"output_dim": 64, "n_window": 100},
            **TOKENS,
        },
    ),
}
"""For each family the beginning of its classes' names, and a configuration."""


def make_family(directory: Path, name: str, *, tied: bool = False, speaks: bool = False, **text: Any) -> Path:
    """Write a tiny model of a family with random weights, always the same ones; `text` changes its text part.

    With `speaks` its tokens of media are those of the tokenizer beside it, so that conversations can be asked of it.
    """
    stem, values = MODELS[name]
    write_model_dir(directory)
    if speaks and "text_config" in values:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        values = values | {key: tokenizer.token_to_id(token) for key, token in NAMED.items()}
    values = values | ({"text_config": values["text_config"] | text} if "text_config" in values else text)
    config = getattr(transformers, f"{stem}Config")(**values, tie_word_embeddings=tied)
    ending = "ForConditionalGeneration" if "text_config" in values else "ForCausalLM"
    torch.manual_seed(0)
    hf_logging.disable_progress_bar()
    model = getattr(transformers, stem + ending)(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter += 0.1 * torch.randn_like(parameter)  # such as start at 0 or 1 would hide mistakes
    for path in directory.glob("*preprocessor_config.json"):
        path.unlink()
    model.save_pretrained(directory)
    if "text_config" in values:
        (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    else:
        (directory / "chat_template.jinja").write_text(TEXT_TEMPLATE)
    return directory
