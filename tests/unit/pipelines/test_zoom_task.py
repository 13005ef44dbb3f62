"""The pictures of the zoom task, and its environment."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from modalities.base import EncodingProfile, MediaLimits
from modalities.registry import load_modalities
from pipelines.zoom_task import COLOURS, NOISE, ZOOMS, Zoom, ZoomSpec, draw, look_closer, make_zoom_data
from relax.agents.environment import Medium, Task

TINY = EncodingProfile(patch_size=8, min_pixels=32 * 32, max_pixels=32 * 32)


def file_of(picture: Image.Image) -> bytes:
    """Return a picture as a PNG file."""
    sink = io.BytesIO()
    picture.save(sink, "PNG")
    return sink.getvalue()


def test_sign_cannot_be_seen_at_the_size_of_the_tiny_model() -> None:
    """Pictures that differ in the colour alone differ by no more than a rounding there, noise by far more."""
    image = load_modalities(TINY, MediaLimits())["image"]
    for seed in range(5):
        seen = [
            image.encode(image.decode(file_of(draw(answer, np.random.default_rng(seed)))))["patches"].astype(
                int
            )
            for answer in COLOURS
        ]
        assert max(np.abs(each - seen[0]).max() for each in seen) <= 1 < NOISE


@pytest.mark.parametrize("answer", COLOURS)
def test_zoom_shows_the_colour_of_the_lighter_quadrants_sign(answer: str) -> None:
    """In the middle of what it returns: above the rim by twice the colour and more."""
    picture = draw(answer, np.random.default_rng(3))
    half = np.asarray(picture).astype(int).reshape(2, 128, 2, 128, 3).mean((1, 3, 4))
    shown = np.asarray(Image.open(io.BytesIO(look_closer(picture, int(half.argmax()))))).astype(int)
    assert shown.shape == (64, 64, 3)
    difference = shown[32, 32] - shown[2, 2]
    assert (np.sign(difference) == np.sign(COLOURS[answer])).all()
    assert np.abs(difference).min() > 80


def test_environment_answers_zooms_and_then_wants_a_colour() -> None:
    """A picture a zoom, the reward for the right word, the end for a zoom too many."""
    picture = file_of(draw("red", np.random.default_rng(0)))
    task = Task(uid="a", prompt_text="", reference_answer="red", media=(Medium("image", picture),))
    zoom = Zoom(max_zooms=1)
    assert zoom.reset(task).is_empty
    step = zoom.step(f" {ZOOMS[2]}")
    assert (step.done, step.reward, len(step.observation.media)) == (False, 0.0, 1)
    assert zoom.step(ZOOMS[2]).done
    right = Zoom()
    right.reset(task)
    assert (right.step("red").reward, right.step("blue").reward) == (1.0, 0.0)
    with pytest.raises(ValueError, match=r"must have one picture, got 0; set media\.keep=bytes"):
        Zoom().reset(Task(uid="a", prompt_text="", reference_answer="red"))


def test_data_are_made_once_and_anew_for_other_numbers(tmp_path: Path) -> None:
    """The same seed gives the same files; other files are left alone."""
    spec = ZoomSpec(num_train=4, num_eval=2)
    train, held_out = make_zoom_data(tmp_path / "zoom", spec)
    assert (len(train.read_text().splitlines()), len(held_out.read_text().splitlines())) == (4, 2)
    first = (tmp_path / "zoom" / "train" / "0000.png").read_bytes()
    made = (tmp_path / "zoom" / "train" / "0000.png").stat().st_ino
    make_zoom_data(tmp_path / "zoom", spec)
    assert (tmp_path / "zoom" / "train" / "0000.png").stat().st_ino == made
    make_zoom_data(tmp_path / "zoom", ZoomSpec(num_train=4, num_eval=2, seed=1))
    assert (tmp_path / "zoom" / "train" / "0000.png").read_bytes() != first
    (tmp_path / "other").mkdir()
    with pytest.raises(FileExistsError, match="must be absent or pictures of this program"):
        make_zoom_data(tmp_path / "other", spec)
