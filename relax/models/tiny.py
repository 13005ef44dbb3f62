"""A tiny Qwen3-Omni-MoE thinker from nothing: random weights, a tokenizer, and every file of a real model directory.

The directory has the layout of Qwen3-Omni (architecture `Qwen3OmniMoeForConditionalGeneration`, the thinker under
`thinker_config`, tensor names that start with `thinker.`), without talker. transformers loads the thinker from it
with no name missing or left over, and so does an inference server that wants the whole layout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    Qwen2Tokenizer,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from relax.models.errors import CheckpointError
from relax.models.expert_stacks import ExpertStacks
from relax.models.loading import Thinker, checkpoint_views
from relax.models.spec import ThinkerSpec
from relax.models.tiny_tokenizer import ANSWER_WORDS, make_tokenizer

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """Sizes of the tiny thinker. The defaults were seen to learn the toy task from random weights."""

    vocab_size: int = 512
    hidden_size: int = 64
    """Width of the language model and of both towers."""
    num_layers: int = 2
    num_heads: int = 4
    num_experts: int = 4
    top_k: int = 2
    """Experts chosen for each token."""
    max_positions: int = 4096
    """Longest sequence in tokens."""
    tower_layers: int = 2
    """Layers of the vision and of the audio tower; the first vision layer also feeds the language model."""
    patch_size: int = 8
    """Side of a patch in pixels."""
    image_size: int = 32
    """Side of the square, in pixels, whose area every picture and frame is resized to."""
    video_fps: float = 4.0
    """Frames sampled from each second of film."""
    video_max_frames: int = 8
    """Most frames sampled from a film."""
    num_mel_bins: int = 128
    """Bands of the log-mel spectrogram."""
    text_init_std: float = 0.1
    """Standard deviation of the language model's random weights."""
    vision_init_std: float = 0.25
    audio_init_std: float = 0.25

    def __post_init__(self) -> None:
        if self.hidden_size % (8 * self.num_heads):
            raise CheckpointError(
                f"TinyConfig: hidden_size must be divisible by 8 x num_heads = {8 * self.num_heads} "
                f"(rotary sections), got {self.hidden_size}"
            )
        if self.image_size % (2 * self.patch_size):
            raise CheckpointError(
                f"TinyConfig: image_size must be divisible by 2 x patch_size = {2 * self.patch_size}, "
                f"got {self.image_size}"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise CheckpointError(
                f"TinyConfig: top_k must be in [1, num_experts = {self.num_experts}], got {self.top_k}"
            )


def make_tiny_omni(
    model_dir: Path | str,
    *,
    seed: int,
    config: TinyConfig | None = None,
    corpus: Sequence[str] = (),
    answer_words: Sequence[str] = ANSWER_WORDS,
) -> Path:
    """Write a tiny thinker into `model_dir` (made when missing, files in it replaced) and return the directory.

    Args:
        model_dir: Where to write.
        seed: Decides the weights; the same arguments give the same bytes.
        config: Sizes.
        corpus: Sentences that should become few tokens.
        answer_words: Words that must be one token each.

    Raises:
        CheckpointError: The sizes or the vocabulary do not fit.
    """
    where, sizes = Path(model_dir), config or TinyConfig()
    where.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(sizes.vocab_size, corpus, answer_words, sizes.max_positions)
    tokenizer.save_pretrained(where)
    thinker_config = _thinker_config(sizes, tokenizer)
    _write_json(where / "config.json", _omni_config(thinker_config, tokenizer))
    _write_json(where / "generation_config.json", _generation_config(tokenizer))
    _write_json(where / "preprocessor_config.json", _preprocessor_config(sizes))
    _write_json(where / "video_preprocessor_config.json", _video_preprocessor_config(sizes))
    hf = Qwen3OmniMoeThinkerForConditionalGeneration(thinker_config)
    _initialise(hf, sizes, seed)
    spec = ThinkerSpec.from_pretrained(where)
    save_weights(Thinker(hf.eval(), spec, where, spec.family.names[0], ExpertStacks({}, 0)), where)
    return where


def save_weights(thinker: Thinker, model_dir: Path | str) -> None:
    """Write the thinker's weights into a model directory, under the names of the checkpoint."""
    tensors = {name: view.contiguous() for name, view in checkpoint_views(thinker).items()}
    save_file(tensors, Path(model_dir) / WEIGHTS_FILE, metadata={"format": "pt"})


def _initialise(hf: torch.nn.Module, sizes: TinyConfig, seed: int) -> None:
    """Draw every matrix and kernel from a normal distribution, set biases to 0 and scales of norms to 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            std = sizes.text_init_std
            if name.startswith("visual."):
                std = sizes.vision_init_std
            elif name.startswith("audio_tower."):
                std = sizes.audio_init_std
            if parameter.dim() >= 2:
                parameter.normal_(0.0, std, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _thinker_config(sizes: TinyConfig, tokenizer: Qwen2Tokenizer) -> Qwen3OmniMoeThinkerConfig:
    def token(name: str) -> Any:
        return tokenizer.convert_tokens_to_ids(f"<|{name}|>")

    half_head = sizes.hidden_size // sizes.num_heads // 2
    side_section = half_head * 3 // 8
    endings = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": 2 * sizes.hidden_size,
        "moe_intermediate_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_heads,
        "head_dim": sizes.hidden_size // sizes.num_heads,
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.top_k,
        "norm_topk_prob": True,
        "max_position_embeddings": sizes.max_positions,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [half_head - 2 * side_section, side_section, side_section],
            "mrope_interleaved": True,
        },
        "initializer_range": sizes.text_init_std,
        **endings,
    }
    vision = {
        "depth": sizes.tower_layers,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": 2 * sizes.hidden_size,
        "num_heads": sizes.num_heads,
        "patch_size": sizes.patch_size,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": sizes.hidden_size,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": sizes.vision_init_std,
    }
    audio = {
        "d_model": sizes.hidden_size,
        "encoder_layers": sizes.tower_layers,
        "encoder_attention_heads": sizes.num_heads,
        "encoder_ffn_dim": 2 * sizes.hidden_size,
        "num_mel_bins": sizes.num_mel_bins,
        "n_window": 50,
        "n_window_infer": 800,
        "downsample_hidden_size": 16,
        "output_dim": sizes.hidden_size,
        "initializer_range": sizes.audio_init_std,
    }
    config_class: Any = Qwen3OmniMoeThinkerConfig  # three of the token ids are not among its annotated fields
    return config_class(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        image_token_id=token("image_pad"),
        video_token_id=token("video_pad"),
        audio_token_id=token("audio_pad"),
        vision_start_token_id=token("vision_start"),
        vision_end_token_id=token("vision_end"),
        audio_start_token_id=token("audio_start"),
        audio_end_token_id=token("audio_end"),
        user_token_id=int(tokenizer.encode("user")[0]),
        # Two frames at 4 a second are half a second: 13 whole steps, as inference servers cut off fractions.
        position_id_per_seconds=26,
        initializer_range=sizes.text_init_std,
        **endings,
    )


def _omni_config(thinker: Qwen3OmniMoeThinkerConfig, tokenizer: Qwen2Tokenizer) -> dict[str, Any]:
    inner = thinker.to_dict()
    inner["architectures"] = ["Qwen3OmniMoeThinkerForConditionalGeneration"]
    inner["dtype"] = "float32"
    for name in ("text_config", "vision_config", "audio_config"):
        inner[name] = {
            key: value
            for key, value in inner[name].items()
            if key not in ("_name_or_path", "transformers_version")
        }
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "dtype": "float32",
        "enable_audio_output": False,
        "im_start_token_id": tokenizer.convert_tokens_to_ids("<|im_start|>"),
        "im_end_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "system_token_id": tokenizer.encode("system")[0],
        "user_token_id": tokenizer.encode("user")[0],
        "assistant_token_id": tokenizer.encode("assistant")[0],
        "thinker_config": inner,
    }


def _generation_config(tokenizer: Qwen2Tokenizer) -> dict[str, Any]:
    return {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _preprocessor_config(sizes: TinyConfig) -> dict[str, Any]:
    """Pictures and sound, flat in one file as Qwen3-Omni has them."""
    return {
        "processor_class": "Qwen3OmniMoeProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        **_pixels(sizes),
        "feature_size": sizes.num_mel_bins,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 300,
        "n_samples": 4_800_000,
        "nb_max_frames": 30_000,
        "padding_side": "right",
        "padding_value": 0.0,
        "dither": 0.0,
        "return_attention_mask": True,
    }


def _video_preprocessor_config(sizes: TinyConfig) -> dict[str, Any]:
    return {
        "processor_class": "Qwen3OmniMoeProcessor",
        "video_processor_type": "Qwen2VLVideoProcessor",
        **_pixels(sizes),
        "fps": sizes.video_fps,
        "min_frames": min(4, sizes.video_max_frames),
        "max_frames": sizes.video_max_frames,
    }


def _pixels(sizes: TinyConfig) -> dict[str, Any]:
    area = sizes.image_size**2
    return {
        "patch_size": sizes.patch_size,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": area,
        "max_pixels": area,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
