"""Reading the processor's numbers from a model directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modalities.profile import EncodingProfile
from tests.kit.media import PROFILE, write_model_dir


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def test_profile_reads_the_tiny_model_directory(tmp_path: Path) -> None:
    """Pictures, sound and film from their files."""
    assert EncodingProfile.from_pretrained(write_model_dir(tmp_path)) == PROFILE


def test_profile_reads_one_combined_file(tmp_path: Path) -> None:
    """Newer transformers write the three processors into processor_config.json."""
    parts = {
        "image_processor": {"patch_size": 14, "size": {"shortest_edge": 784, "longest_edge": 7840}},
        "video_processor": {
            "size": {"shortest_edge": 1568, "longest_edge": 15680},
            "fps": 1,
            "max_frames": 32,
        },
        "feature_extractor": {"feature_size": 80, "hop_length": 200},
    }
    _write(tmp_path / "processor_config.json", parts)
    profile = EncodingProfile.from_pretrained(tmp_path)
    assert (profile.patch_size, profile.min_pixels, profile.video_max_pixels) == (14, 784, 15680)
    assert (profile.video_fps, profile.video_max_frames) == (1, 32)
    assert (profile.num_mel_bins, profile.hop_length_samples) == (80, 200)


def test_profile_gives_films_the_numbers_of_pictures_without_their_own_file(tmp_path: Path) -> None:
    """The published Qwen3-Omni directory has no video_preprocessor_config.json."""
    _write(tmp_path / "preprocessor_config.json", {"min_pixels": 3136, "max_pixels": 12845056})
    profile = EncodingProfile.from_pretrained(tmp_path)
    assert (profile.video_min_pixels, profile.video_max_pixels) == (3136, 12845056)


def test_profile_reads_token_names(tmp_path: Path) -> None:
    """A model with other token names says so in tokenizer_config.json."""
    _write(tmp_path / "preprocessor_config.json", {"patch_size": 14})
    names = {"image_token": "<|IMAGE|>", "vision_bos_token": {"content": "<|vision_bos|>"}}
    _write(tmp_path / "tokenizer_config.json", {"extra_special_tokens": names})
    tokens = EncodingProfile.from_pretrained(tmp_path).tower_tokens
    assert tokens["image"] == ("<|vision_bos|>", "<|IMAGE|>", "<|vision_end|>")
    assert tokens["video"] == ("<|vision_bos|>", "<|video_pad|>", "<|vision_end|>")


def test_profile_refuses_a_directory_without_processor(tmp_path: Path) -> None:
    """The message names the file that is missing."""
    with pytest.raises(FileNotFoundError) as caught:
        EncodingProfile.from_pretrained(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: must have preprocessor_config.json, got none; save the model's processor there"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"patch_size": 0}, "patch_size must be positive, got 0"),
        ({"min_pixels": 9, "max_pixels": 4}, "min_pixels must be at most max_pixels 4, got 9"),
        ({"image_std": [0.5, 0.5, 0]}, "image_mean and image_std must be three numbers each"),
    ],
)
def test_profile_refuses_impossible_numbers(tmp_path: Path, content: dict, message: str) -> None:
    """Numbers that no processor can have are refused with their directory."""
    _write(tmp_path / "preprocessor_config.json", content)
    with pytest.raises(ValueError, match=f"^{tmp_path}: encoding profile: {message}"):
        EncodingProfile.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("config", "towers", "audio_rule", "film_in_frames"),
    [
        ({"model_type": "qwen3"}, [], "qwen3_omni", False),
        ({"model_type": "qwen3_vl", "vision_config": {}}, ["image", "video"], "qwen3_omni", True),
        (
            {"model_type": "qwen2_5_omni", "thinker_config": {"vision_config": {}, "audio_config": {}}},
            ["image", "audio", "video"],
            "qwen2_5_omni",
            False,
        ),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_profile_has_the_towers_of_the_model(
    tmp_path: Path, config: dict, towers: list[str], audio_rule: str, film_in_frames: bool
) -> None:
    """A text model needs no processor; how sounds and films are counted is the family's."""
    _write(tmp_path / "config.json", config)
    if towers:
        _write(tmp_path / "preprocessor_config.json", {"patch_size": 14})
    profile = EncodingProfile.from_pretrained(tmp_path)
    assert sorted(profile.tower_tokens) == sorted(towers)
    assert (profile.audio_rule, profile.film_in_frames) == (audio_rule, film_in_frames)


def test_profile_refuses_an_unknown_audio_rule() -> None:
    """With those that there are."""
    with pytest.raises(
        ValueError, match=r"audio_rule must be one of qwen3_omni, qwen2_5_omni, got 'whisper'"
    ):
        EncodingProfile(audio_rule="whisper")
