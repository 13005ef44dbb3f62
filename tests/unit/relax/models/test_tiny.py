"""The tiny model's directory is a real model directory."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)

from modalities.base import EncodingProfile
from relax.models.errors import CheckpointError
from relax.models.tiny import TinyConfig, make_tiny_omni
from relax.models.tiny_tokenizer import ANSWER_WORDS, make_tokenizer

MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What colour is it?"}]}]


def test_tiny_loads_in_transformers(tiny_dir, thinker):
    """`from_pretrained` finds every tensor and no other, though the directory has the whole Omni layout."""
    hf, info = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(tiny_dir, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    ours, theirs = thinker.hf.state_dict(), hf.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    config = AutoConfig.from_pretrained(tiny_dir)
    assert config.architectures == ["Qwen3OmniMoeForConditionalGeneration"]
    assert config.thinker_config.text_config.num_experts == 4
    assert WhisperFeatureExtractor.from_pretrained(tiny_dir).feature_size == 128


def test_tiny_tokenizer_loads_in_transformers(tiny_dir):
    """AutoTokenizer reads it back: round trips, chat form, single-token answers and special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    assert len(tokenizer) == 512
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode(tokenizer.encode("Größe 寸法 42?")) == "Größe 寸法 42?"
    assert all(len(tokenizer.encode(word)) == 1 for word in ANSWER_WORDS)
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What colour is it?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)).count("<|image_pad|>") == 1


def test_tiny_profile_is_the_models(tiny_dir, thinker):
    """What the encoders read fits what the towers take."""
    profile = EncodingProfile.from_pretrained(tiny_dir)
    assert profile.patch_values == thinker.spec.patch_values
    assert profile.num_mel_bins == thinker.spec.num_mel_bins
    assert (profile.min_pixels, profile.max_pixels) == (1024, 1024)
    assert (profile.video_fps, profile.video_max_frames) == (4.0, 8)


def test_tiny_is_decided_by_its_seed(tiny_dir, tmp_path):
    """Same seed same weights, another seed others."""
    weights = {}
    for seed in (0, 1):
        directory = make_tiny_omni(tmp_path / str(seed), seed=seed)
        weights[seed] = (directory / "model.safetensors").read_bytes()
    assert weights[0] == (tiny_dir / "model.safetensors").read_bytes()
    assert weights[0] != weights[1]


def test_tiny_refuses_sizes_that_do_not_fit():
    """Rotary sections, patches and experts are checked at construction."""
    with pytest.raises(CheckpointError, match="hidden_size must be divisible by 8 x num_heads = 32"):
        TinyConfig(hidden_size=48)
    with pytest.raises(CheckpointError, match="image_size must be divisible by 2 x patch_size = 16"):
        TinyConfig(image_size=40)
    with pytest.raises(CheckpointError, match="top_k must be in"):
        TinyConfig(top_k=5)


def test_tokenizer_refuses_a_vocabulary_too_small_for_the_words():
    """Answer words that cannot be one token are named."""
    with pytest.raises(CheckpointError, match="answer words must be one token each"):
        make_tokenizer(270)
