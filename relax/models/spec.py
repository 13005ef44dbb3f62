"""What the code around a thinker must know of it, read from its directory without building it. No weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modalities.profile import EncodingProfile
from relax.models.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class ThinkerSpec:
    """Sizes and token ids of one Qwen3-Omni-MoE thinker, and how its pixels are normalised."""

    vocab_size: int
    max_positions: int
    """Longest sequence in tokens, prompt and completion together."""
    hidden_size: int
    num_layers: int
    num_experts: int
    top_k: int
    """Experts chosen for each token in each layer."""
    pad_token_id: int
    eos_token_ids: tuple[int, ...]
    """A completion stops after the first of these."""
    image_token_id: int
    video_token_id: int
    audio_token_id: int
    vision_start_token_id: int
    audio_start_token_id: int
    num_heads: int
    num_key_value_heads: int
    dense_width: int | None
    """Width of the feed-forward part of layers without experts; None when every layer has experts."""
    num_deepstack: int
    """First layers that add visual features of their own."""
    patch_size: int
    """Side of a square patch in pixels."""
    temporal_patch_size: int
    """Frames in a patch."""
    merge_size: int
    """Side, in patches, of the square that becomes one token."""
    image_mean: tuple[float, ...]
    """Of each colour, of values in [0, 1]."""
    image_std: tuple[float, ...]
    num_mel_bins: int
    position_id_per_seconds: float = 25.0
    """Steps of the rotary time axis in a second of film."""

    @property
    def patch_values(self) -> int:
        """Number of values in one patch: channels x frames x height x width."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @classmethod
    def from_pretrained(cls, model_dir: Path | str) -> ThinkerSpec:
        """Read config.json, generation_config.json (when there) and the processor's configuration.

        Raises:
            CheckpointError: A file is missing or not JSON, or a needed key is absent.
        """
        where = Path(model_dir)
        config = _read_json(where / "config.json")
        thinker = config.get("thinker_config", config)
        generation_file = where / "generation_config.json"
        generation = _read_json(generation_file) if generation_file.exists() else {}
        try:
            profile = EncodingProfile.from_pretrained(where)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"ThinkerSpec: {error}") from error
        try:
            return cls(
                **_fields(thinker, generation), image_mean=profile.image_mean, image_std=profile.image_std
            )
        except KeyError as error:
            raise CheckpointError(
                f"ThinkerSpec: {where} must have {error.args[0]!r} in its configuration; "
                "is it a Qwen3-Omni-MoE thinker?"
            ) from error


def _fields(thinker: dict[str, Any], generation: dict[str, Any]) -> dict[str, Any]:
    text, vision, audio = thinker["text_config"], thinker["vision_config"], thinker["audio_config"]
    eos = generation.get("eos_token_id", text.get("eos_token_id"))
    if eos is None:
        raise KeyError("eos_token_id")
    eos_ids = tuple(eos) if isinstance(eos, list) else (eos,)
    pad = generation.get("pad_token_id", text.get("pad_token_id"))
    return {
        "vocab_size": text["vocab_size"],
        "max_positions": text["max_position_embeddings"],
        "hidden_size": text["hidden_size"],
        "num_layers": text["num_hidden_layers"],
        "num_experts": text["num_experts"],
        "top_k": text["num_experts_per_tok"],
        "pad_token_id": eos_ids[0] if pad is None else pad,
        "eos_token_ids": eos_ids,
        "image_token_id": thinker["image_token_id"],
        "video_token_id": thinker["video_token_id"],
        "audio_token_id": thinker["audio_token_id"],
        "vision_start_token_id": thinker["vision_start_token_id"],
        "audio_start_token_id": thinker["audio_start_token_id"],
        "num_heads": text["num_attention_heads"],
        "num_key_value_heads": text["num_key_value_heads"],
        "dense_width": text.get("intermediate_size") if _has_dense_layers(text) else None,
        "num_deepstack": len(vision.get("deepstack_visual_indexes") or ()),
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "num_mel_bins": audio["num_mel_bins"],
        "position_id_per_seconds": thinker.get("position_id_per_seconds", 25),
    }


def _has_dense_layers(text: dict[str, Any]) -> bool:
    return bool(text.get("mlp_only_layers")) or text.get("decoder_sparse_step", 1) > 1


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"ThinkerSpec: {path} must be readable, got {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"ThinkerSpec: {path} must be JSON, got {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"ThinkerSpec: {path} must hold a JSON object, got {type(value).__name__}")
    return value
