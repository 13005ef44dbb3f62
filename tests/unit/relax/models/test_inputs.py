"""Prompts that the model would crash on or misread are refused, each with its reason."""

from __future__ import annotations

import numpy as np
import pytest

from relax.models.errors import PromptError
from relax.models.inputs import PromptInputs, check_prompt
from relax.models.spec import ThinkerSpec


@pytest.fixture(scope="module")
def spec(tiny_dir):
    return ThinkerSpec.from_pretrained(tiny_dir)


def test_check_prompt_accepts_every_mixture(make_prompt, spec):
    """Text, each medium, and all together pass."""
    for towers in ((), ("image",), ("audio",), ("video",), ("video", "image", "audio", "image")):
        check_prompt(make_prompt(*towers), spec)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "must be a non-empty row of integers"),
        ([[1, 2]], "must be a non-empty row of integers"),
        ([1.5], "must be a non-empty row of integers"),
        ([1, 512], r"must be in \[0, 512\), got 512"),
        ([-1], r"must be in \[0, 512\), got -1"),
        ([1] * 4097, r"must be at most 4096 long .* got 4097; shorten"),
    ],
)
def test_check_prompt_refuses_token_ids(spec, token_ids, message):
    """Ids must be a row of known tokens that fits the positions."""
    with pytest.raises(PromptError, match=message):
        check_prompt(PromptInputs(np.array(token_ids)), spec)


def _changed(prompt, tower, **values):
    medium = {k: v for k, v in (dict(prompt.media[tower][0]) | values).items() if v is not None}
    return PromptInputs(prompt.token_ids, {tower: [medium]})


def test_check_prompt_refuses_media(make_prompt, spec):
    """Wrong keys, shapes, types and values of media are named."""
    image, audio, video = (make_prompt(tower) for tower in ("image", "audio", "video"))
    patches = image.media["image"][0]["patches"]
    cases = [
        (_changed(image, "image", patches=None), "image media must have 'patches'"),
        (_changed(image, "image", patches=patches.astype(np.float32)), "patches must be uint8"),
        (_changed(image, "image", patches=patches[:-1]), r"patches must be uint8 \[16, 384\] for grid"),
        (_changed(image, "image", grid_thw=np.array([1, 3, 4])), "divisible by 2"),
        (_changed(video, "video", second_per_grid=np.array(np.nan)), "second_per_grid must be finite"),
        (_changed(audio, "audio", features=np.zeros((3, 50), np.float32)), r"must be \[128, num_frames\]"),
        (_changed(audio, "audio", features=np.full((128, 50), np.nan, np.float32)), "must be finite"),
        (PromptInputs(image.token_ids, {"smell": []}), r"media must be of the towers .* got \['smell'\]"),
    ]
    for prompt, message in cases:
        with pytest.raises(PromptError, match=message):
            check_prompt(prompt, spec, "prompt 3")


def test_check_prompt_refuses_placeholders_without_media(make_prompt, spec):
    """Placeholders and media must agree in number and length, and follow their start token."""
    image = make_prompt("image")
    with pytest.raises(
        PromptError, match=r"^row 1: runs of the image placeholder .* must be \[\] long .* got \[4\]"
    ):
        check_prompt(PromptInputs(image.token_ids, {}), spec, "row 1")
    with pytest.raises(PromptError, match=r"must be \[4\] long for its media, got \[\]"):
        check_prompt(PromptInputs(np.array([1, 2]), image.media), spec)
    without_start = np.where(image.token_ids == spec.vision_start_token_id, 1, image.token_ids)
    with pytest.raises(PromptError, match="must follow the start token"):
        check_prompt(PromptInputs(without_start, image.media), spec)
