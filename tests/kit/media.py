"""Small real media files in memory, and a model directory without weights, for tests. No torch."""

from __future__ import annotations

import io
import json
import math
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import soundfile
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from modalities.base import EncodingProfile, MediaLimits

PROFILE = EncodingProfile(
    patch_size=8,
    min_pixels=32 * 32,
    max_pixels=64 * 64,
    video_min_pixels=32 * 32,
    video_max_pixels=64 * 64,
    video_fps=4.0,
)
LIMITS = MediaLimits()

CHAT_TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- elif part.type == 'text' %}{{ part.text }}{% endif %}
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def picture_bytes(width: int = 40, height: int = 24, file_format: str = "PNG", seed: int = 0) -> bytes:
    """Return a picture of noise as a file."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, file_format)
    return buffer.getvalue()


def blank_png_bytes(width: int, height: int) -> bytes:
    """Return a black one-bit PNG of any size; it costs a few kilobytes."""
    buffer = io.BytesIO()
    Image.new("1", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def tone(seconds: float = 0.5, rate_hz: int = 16_000, hz: float = 440.0) -> np.ndarray:
    """Return a tone with a little noise, float32 [num_samples]."""
    time_s = np.arange(int(seconds * rate_hz)) / rate_hz
    noise = np.random.default_rng(0).standard_normal(len(time_s)) * 0.01
    return (0.4 * np.sin(2 * math.pi * hz * time_s) + noise).astype(np.float32)


def sound_bytes(
    samples: np.ndarray, rate_hz: int = 16_000, file_format: str = "WAV", subtype: str | None = None
) -> bytes:
    """Return samples as a sound file."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate_hz, format=file_format, subtype=subtype)
    return buffer.getvalue()


def film_bytes(
    num_frames: int = 8,
    *,
    width: int = 64,
    height: int = 48,
    fps: int = 4,
    sound: np.ndarray | None = None,
    picture: bool = True,
) -> bytes:
    """Return an MP4 (H.264) of a brightening grey, with an AAC sound track if `sound` (16 kHz) is given."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        film = container.add_stream("libx264", rate=fps, options={"crf": "10"}) if picture else None
        track = container.add_stream("aac", rate=16_000, layout="mono") if sound is not None else None
        if film is not None:
            film.width, film.height, film.pix_fmt = width, height, "yuv420p"
            for number in range(num_frames):
                grey = np.full((height, width, 3), 20 + number * 200 // num_frames, np.uint8)
                frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
                frame.pts, frame.time_base = number, Fraction(1, fps)
                container.mux(film.encode(frame))
            container.mux(film.encode(None))
        if track is not None and sound is not None:
            for start in range(0, len(sound) // 1024 * 1024, 1024):
                block = av.AudioFrame.from_ndarray(
                    sound[None, start : start + 1024], format="fltp", layout="mono"
                )
                block.sample_rate, block.pts, block.time_base = 16_000, start, Fraction(1, 16_000)
                container.mux(track.encode(block))
            container.mux(track.encode(None))
    return buffer.getvalue()


def write_model_dir(directory: Path) -> Path:
    """Write tokenizer, chat template and processor configuration of a tiny Qwen3-Omni; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["What colour is the shape? red green blue yellow\n"] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_json(
        directory / "tokenizer_config.json", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    )
    size = {"shortest_edge": PROFILE.min_pixels, "longest_edge": PROFILE.max_pixels}
    vision = {"patch_size": PROFILE.patch_size, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    sound = {"feature_size": 128, "sampling_rate": 16_000, "hop_length": 160, "n_fft": 400}
    mean_std = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    _write_json(directory / "preprocessor_config.json", vision | mean_std | sound)
    _write_json(directory / "video_preprocessor_config.json", vision | {"fps": PROFILE.video_fps})
    return directory


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2))
