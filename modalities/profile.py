"""The numbers that the model's own processor encodes media with, read from its directory. Pure data.

It is not the model's configuration: layers and widths are of no concern here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

Tower = Literal["image", "audio", "video"]
TOWERS: tuple[Tower, ...] = ("image", "audio", "video")

AUDIO_RULES = ("qwen3_omni", "qwen2_5_omni")

TokenTriple = tuple[str, str, str]
"""Start token, placeholder token (repeated once for each media token), end token."""


def _qwen3_omni_tokens() -> dict[str, TokenTriple]:
    return {
        "image": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
        "audio": ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
        "video": ("<|vision_start|>", "<|video_pad|>", "<|vision_end|>"),
    }


@dataclass(frozen=True, kw_only=True)
class EncodingProfile:
    """How media become model inputs. The defaults are those of Qwen3-Omni."""

    patch_size: int = 16
    """Edge of a patch in pixels."""
    merge_size: int = 2
    """Patches along each edge that become one token."""
    temporal_patch_size: int = 2
    """Frames in a patch; a picture is repeated that often."""
    min_pixels: int = 3136
    """Least width times height after resizing a picture."""
    max_pixels: int = 12_845_056
    """Most width times height after resizing a picture."""
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Mean of each colour, of values in [0, 1]; the trainer normalises, `encode` does not."""
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Standard deviation of each colour, of values in [0, 1]."""
    video_min_pixels: int = 131_072
    """Least width times height after resizing a frame."""
    video_max_pixels: int = 786_432
    """Most width times height after resizing a frame."""
    video_fps: float = 2.0
    """Frames sampled from each second of film."""
    video_min_frames: int = 4
    """Least frames sampled, if the film has them."""
    video_max_frames: int = 768
    """Most frames sampled."""
    num_mel_bins: int = 128
    """Bands of the log-mel spectrogram."""
    sampling_rate_hz: int = 16_000
    """Samples a second that the audio tower wants."""
    hop_length_samples: int = 160
    """Samples between two log-mel frames."""
    n_fft_samples: int = 400
    """Samples under the window of one log-mel frame."""
    audio_rule: str = "qwen3_omni"
    """How many tokens come of so many log-mel frames, by the name of the first model that counts so."""
    film_in_frames: bool = False
    """Whether each temporal patch of a film has placeholders of its own, after its time in words. The pixels of a film
    are then those of all its frames together."""
    tower_tokens: dict[str, TokenTriple] = field(default_factory=_qwen3_omni_tokens)
    """For each tower that the model has, the tokens around and in place of its media."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                raise ValueError(f"encoding profile: {item.name} must be positive, got {value!r}")
        for low, high in (
            ("min_pixels", "max_pixels"),
            ("video_min_pixels", "video_max_pixels"),
            ("video_min_frames", "video_max_frames"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(
                    f"encoding profile: {low} must be at most {high} {getattr(self, high)}, got {getattr(self, low)}"
                )
        if min(self.image_std) <= 0 or not len(self.image_mean) == len(self.image_std) == 3:
            raise ValueError(
                "encoding profile: image_mean and image_std must be three numbers each, the latter positive, "
                f"got {self.image_mean} and {self.image_std}"
            )
        if not set(self.tower_tokens) <= set(TOWERS):
            raise ValueError(
                f"encoding profile: tower_tokens must be of the towers {TOWERS}, got {[*self.tower_tokens]}"
            )
        if self.audio_rule not in AUDIO_RULES:
            raise ValueError(
                f"encoding profile: audio_rule must be one of {', '.join(AUDIO_RULES)}, got {self.audio_rule!r}"
            )

    @property
    def resize_factor(self) -> int:
        """Pixels that an edge is rounded to a multiple of."""
        return self.patch_size * self.merge_size

    @property
    def patch_values(self) -> int:
        """Numbers in one flattened patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @classmethod
    def from_pretrained(cls, model_dir: str | Path) -> EncodingProfile:
        """Read the profile of a Hugging Face model directory.

        Pictures and sound come from `preprocessor_config.json` (or, if that is missing, from the parts of
        `processor_config.json`); films from `video_preprocessor_config.json`, and without that file the numbers
        for pictures hold for frames too. Token names come from `tokenizer_config.json`. A key that is absent
        keeps the default. Which towers there are, and what of them is a matter of the family, says `config.json`; a
        model without towers needs no processor configuration.

        Raises:
            FileNotFoundError: the directory has no processor configuration, and the model has towers.
            ValueError: a file is not JSON or a number in it is impossible.
        """
        directory = Path(model_dir)
        both = _read_json(directory / "processor_config.json")
        picture = _read_json(directory / "preprocessor_config.json") or {
            **both.get("feature_extractor", {}),
            **both.get("image_processor", {}),
        }
        model = _read_json(directory / "config.json")
        towers = _towers(model)
        if not picture and towers:
            raise FileNotFoundError(
                f"{directory}: must have preprocessor_config.json, got none; save the model's processor there"
            )
        film = {
            **picture,
            **both.get("video_processor", {}),
            **_read_json(directory / "video_preprocessor_config.json"),
        }
        try:
            return cls(
                **_picture_numbers(picture),
                **_film_numbers(film),
                **_renamed(
                    picture,
                    num_mel_bins="feature_size",
                    sampling_rate_hz="sampling_rate",
                    hop_length_samples="hop_length",
                    n_fft_samples="n_fft",
                ),
                **_family_numbers(str(model.get("model_type"))),
                tower_tokens=_tower_tokens(_read_json(directory / "tokenizer_config.json"), towers),
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"{directory}: {error}") from error


def _picture_numbers(source: Mapping[str, Any]) -> dict[str, Any]:
    numbers = _renamed(
        source, patch_size="patch_size", merge_size="merge_size", temporal_patch_size="temporal_patch_size"
    )
    numbers |= {
        name: tuple(source[name]) for name in ("image_mean", "image_std") if source.get(name) is not None
    }
    return numbers | _pixel_range(source, "")


def _film_numbers(source: Mapping[str, Any]) -> dict[str, Any]:
    return _pixel_range(source, "video_") | _renamed(
        source, video_fps="fps", video_min_frames="min_frames", video_max_frames="max_frames"
    )


def _pixel_range(source: Mapping[str, Any], prefix: str) -> dict[str, int]:
    size = source.get("size") or {}
    low = source.get("min_pixels") or size.get("min_pixels") or size.get("shortest_edge")
    high = source.get("max_pixels") or size.get("max_pixels") or size.get("longest_edge")
    numbers = {f"{prefix}min_pixels": low, f"{prefix}max_pixels": high}
    return {name: number for name, number in numbers.items() if number is not None}


def _renamed(source: Mapping[str, Any], **names: str) -> dict[str, Any]:
    return {ours: source[theirs] for ours, theirs in names.items() if source.get(theirs) is not None}


def _towers(model: Mapping[str, Any]) -> tuple[Tower, ...]:
    """Return the towers of a model's configuration; all of them where nothing is said."""
    if not model:
        return TOWERS
    parts = model.get("thinker_config", model)
    visual: tuple[Tower, ...] = ("image", "video") if "vision_config" in parts else ()
    heard: tuple[Tower, ...] = ("audio",) if "audio_config" in parts else ()
    return tuple(tower for tower in TOWERS if tower in (*visual, *heard))


def _family_numbers(model_type: str) -> dict[str, Any]:
    if model_type.startswith("qwen2_5_omni"):
        return {"audio_rule": "qwen2_5_omni"}
    return {"film_in_frames": model_type.startswith("qwen3_vl")}


def _tower_tokens(config: Mapping[str, Any], towers: tuple[Tower, ...]) -> dict[str, TokenTriple]:
    named = {**config}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(config.get(key), Mapping):
            named |= config[key]
    tokens = {}
    for tower, (start, pad, end) in _qwen3_omni_tokens().items():
        edge = "audio" if tower == "audio" else "vision"
        keys = (f"{edge}_bos_token", f"{tower}_token", f"{edge}_eos_token")
        first, middle, last = (
            _token_text(named.get(key), default) for key, default in zip(keys, (start, pad, end), strict=True)
        )
        tokens[tower] = (first, middle, last)
    return {tower: tokens[tower] for tower in towers}


def _token_text(entry: Any, default: str) -> str:
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    return text if isinstance(text, str) else default


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: must be JSON, got a file that breaks off: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a JSON object, got {type(content).__name__}")
    return content
