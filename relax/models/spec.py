"""What the code around a model must know of it, read from its directory without building it. No weights, no torch.

"Thinker" is the language model with its towers, as the omni-modal families call it; a text model is one without towers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modalities.profile import EncodingProfile
from relax.models.errors import CheckpointError
from relax.models.families import Family, family_of

NO_TOKEN = -1
"""Id of a token that the model does not have."""


@dataclass(frozen=True, kw_only=True)
class ThinkerSpec:
    """Family, sizes and token ids of one model, and how its pixels are normalised."""

    family: Family
    vocab_size: int
    max_positions: int
    """Longest sequence in tokens, prompt and completion together."""
    hidden_size: int
    num_layers: int
    num_experts: int
    """0 for a dense model."""
    top_k: int
    """Experts chosen for each token in each layer; 0 for a dense model."""
    pad_token_id: int
    eos_token_ids: tuple[int, ...]
    """A completion stops after the first of these."""
    image_token_id: int
    """This and the next four are `NO_TOKEN` without the tower."""
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
    audio_rule: str = "qwen3_omni"
    """Which tokens come of so many log-mel frames; see `modalities.base.num_audio_tokens`."""
    tied: bool = False
    """Whether token embedding and output share a matrix."""

    @property
    def patch_values(self) -> int:
        """Number of values in one patch: channels x frames x height x width."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @classmethod
    def from_pretrained(cls, model_dir: Path | str) -> ThinkerSpec:
        """Read config.json, generation_config.json (when there) and the processor's configuration.

        Raises:
            CheckpointError: A file is missing or not JSON, the family is unknown, or a needed key is absent.
        """
        where = Path(model_dir)
        config = _read_json(where / "config.json")
        family = family_of(config, where / "config.json")
        try:
            profile = EncodingProfile.from_pretrained(where)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"ThinkerSpec: {error}") from error
        model = config.get(family.config_key, config) if family.config_key else config
        try:
            return cls(
                family=family,
                **_text_numbers(model.get("text_config", model), model),
                **_endings(model, where),
                **_media_numbers(model, family, profile),
            )
        except KeyError as error:
            raise CheckpointError(
                f"ThinkerSpec: {where} must have {error.args[0]!r} in its configuration, as a {family.name} has, "
                "got none"
            ) from error


def _text_numbers(text: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    num_experts = text.get("num_experts", text.get("num_local_experts", 0)) or 0
    tied = model.get("tie_word_embeddings")
    return {
        "vocab_size": text["vocab_size"],
        "max_positions": text["max_position_embeddings"],
        "hidden_size": text["hidden_size"],
        "num_layers": text["num_hidden_layers"],
        "num_experts": num_experts,
        "top_k": text["num_experts_per_tok"] if num_experts else 0,
        "num_heads": text["num_attention_heads"],
        "num_key_value_heads": text["num_key_value_heads"],
        "dense_width": text.get("intermediate_size") if _has_dense_layers(text, num_experts) else None,
        "tied": bool(tied),
    }


def _endings(model: dict[str, Any], where: Path) -> dict[str, Any]:
    """Return the tokens that end and that pad; of the files that say so, the first counts."""
    generation_file = where / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else {}
    said = (generation, model.get("text_config", {}), model, _tokenizer_endings(where))
    eos = next((each["eos_token_id"] for each in said if each.get("eos_token_id") is not None), None)
    pad = next((each["pad_token_id"] for each in said if each.get("pad_token_id") is not None), None)
    if eos is None:
        raise KeyError("eos_token_id")
    eos_ids = tuple(eos) if isinstance(eos, list) else (eos,)
    return {"pad_token_id": eos_ids[0] if pad is None else pad, "eos_token_ids": eos_ids}


def _tokenizer_endings(where: Path) -> dict[str, Any]:
    path = where / "tokenizer_config.json"
    config = _read_json(path) if path.exists() else {}
    ids = {entry["content"]: int(number) for number, entry in config.get("added_tokens_decoder", {}).items()}
    named = {}
    for name in ("eos_token", "pad_token"):
        token = config.get(name)
        named[f"{name}_id"] = ids.get(token.get("content") if isinstance(token, dict) else token)
    return named


def _media_numbers(model: dict[str, Any], family: Family, profile: EncodingProfile) -> dict[str, Any]:
    vision, audio = model.get("vision_config", {}), model.get("audio_config", {})
    tokens = {
        name: _token(model, name) if tower in family.towers else NO_TOKEN
        for name, tower in (
            ("image_token_id", "image"),
            ("video_token_id", "video"),
            ("audio_token_id", "audio"),
            ("vision_start_token_id", "image"),
            ("audio_start_token_id", "audio"),
        )
    }
    return tokens | {
        "num_deepstack": len(vision.get("deepstack_visual_indexes") or ()) if family.has_deepstack else 0,
        "patch_size": vision.get("patch_size", profile.patch_size),
        "temporal_patch_size": vision.get("temporal_patch_size", profile.temporal_patch_size),
        "merge_size": vision.get("spatial_merge_size", profile.merge_size),
        "num_mel_bins": audio.get("num_mel_bins", profile.num_mel_bins),
        "audio_rule": profile.audio_rule,
        "image_mean": profile.image_mean,
        "image_std": profile.image_std,
        "position_id_per_seconds": model.get("position_id_per_seconds", vision.get("tokens_per_second", 25)),
    }


def _token(model: dict[str, Any], name: str) -> int:
    """Return a token's id, under its name or under the older one that ends in `_index`."""
    older = name.removesuffix("_id") + "_index"
    return model[older] if older in model and name not in model else model[name]


def _has_dense_layers(text: dict[str, Any], num_experts: int) -> bool:
    return not num_experts or bool(text.get("mlp_only_layers")) or text.get("decoder_sparse_step", 1) > 1


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
