"""Prompts of models that are no omni models: text alone, and films frame by frame."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from modalities.base import num_audio_tokens
from modalities.registry import load_modalities
from relax.data.errors import RowError
from relax.data.manifest import Manifest, Record
from relax.data.prompts import Prompt, PromptBuilder
from tests.kit.families import TEXT_TEMPLATE
from tests.kit.media import LIMITS, PROFILE, film_bytes, picture_bytes, write_model_dir

VISUAL = {tower: PROFILE.tower_tokens[tower] for tower in ("image", "video")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture, a film, and two model directories that differ in their templates."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.png").write_bytes(picture_bytes())
    (folder / "d.mp4").write_bytes(film_bytes(num_frames=8, fps=4))
    write_model_dir(folder / "visual")
    write_model_dir(folder / "text")
    (folder / "text" / "chat_template.jinja").write_text(TEXT_TEMPLATE)
    return folder


def record(folder: Path, text: str, **media: list[str]) -> Record:
    """Return a row of a manifest."""
    row = {"messages": [{"role": "user", "content": text}], "answer": "red", **media}
    (folder / "one.jsonl").write_text(json.dumps(row))
    made = Manifest(folder / "one.jsonl")[0]
    assert isinstance(made, Record), made
    return made


def builder(model_dir: Path, **profile: object) -> PromptBuilder:
    """Return a builder for a model with this profile."""
    return PromptBuilder(
        model_dir, load_modalities(replace(PROFILE, **profile), LIMITS), max_prompt_tokens=900
    )


def shown(folder: Path, prompt: Prompt | RowError) -> str:
    """Return the tokens as text."""
    assert isinstance(prompt, Prompt), prompt
    tokenizer = Tokenizer.from_file(str(folder / "visual" / "tokenizer.json"))
    return tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)


def test_text_models_get_their_messages_as_text(folder: Path) -> None:
    """Their templates know no lists of parts."""
    made = builder(folder / "text", tower_tokens={}).build(record(folder, "What colour?"))
    assert shown(folder, made) == "<|im_start|>user\nWhat colour?<|im_end|>\n<|im_start|>assistant\n"


def test_media_without_a_tower_are_row_errors(folder: Path) -> None:
    """Place, rule, value."""
    made = builder(folder / "text", tower_tokens={}).build(record(folder, "<image>?", images=["a.png"]))
    assert isinstance(made, RowError)
    assert made.reason == "media must be for a tower of the model (none), got 'image' for 'image'"


def test_films_in_frames_have_their_times_before_them(folder: Path) -> None:
    """Each temporal patch has placeholders of its own; pictures stay as they are, text around them too."""
    row = record(folder, "See <video> and <image>.", images=["a.png"], videos=["d.mp4"])
    made = builder(folder / "visual", tower_tokens=VISUAL, film_in_frames=True).build(row)
    assert isinstance(made, Prompt)
    film, picture = (item.encoded for item in made.media)
    per_frame, in_picture = (int(np.prod(each["grid_thw"][1:])) // 4 for each in (film, picture))
    assert film["grid_thw"][0] == 4
    frame = f"<|vision_start|>{'<|video_pad|>' * per_frame}<|vision_end|>"
    film_text = "".join(f"<{time_s} seconds>{frame}" for time_s in ("0.1", "0.6", "1.1", "1.6"))
    picture_text = f"<|vision_start|>{'<|image_pad|>' * in_picture}<|vision_end|>"
    assert shown(folder, made) == (
        f"<|im_start|>user\nSee {film_text} and {picture_text}.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_films_in_frames_share_the_pixels_of_the_film(folder: Path) -> None:
    """What the processor allows is for all frames together."""
    row = record(folder, "<video>", videos=["d.mp4"])
    sizes = {"video_min_pixels": 1024, "video_max_pixels": 8192}
    apart = builder(folder / "visual", tower_tokens=VISUAL, **sizes).build(row)
    shared = builder(folder / "visual", tower_tokens=VISUAL, film_in_frames=True, **sizes).build(row)
    assert isinstance(apart, Prompt)
    assert isinstance(shared, Prompt)
    pixels = [int(np.prod(made.media[0].encoded["grid_thw"][1:])) * 64 for made in (apart, shared)]
    assert pixels[0] == 64 * 48
    assert pixels[1] <= 8192 / 8


def test_num_audio_tokens_of_qwen2_5_omni() -> None:
    """Halved rounding up, then rounding down; 200 frames are 50 tokens."""
    lengths = (3, 4, 5, 99, 100, 200, 201, 3000)
    assert [num_audio_tokens(n, "qwen2_5_omni") for n in lengths] == [1, 1, 1, 25, 25, 50, 50, 750]
