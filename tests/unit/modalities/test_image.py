"""Pictures: the arithmetic of the model's own processor, and refusals that cost nothing."""

from __future__ import annotations

import io
import tracemalloc

import numpy as np
import pytest
from PIL import Image as PilImage

from modalities.base import MediaLimits
from modalities.errors import CorruptMediaError, MediaLimitError
from modalities.image import Image, open_picture
from tests.kit.media import LIMITS, PROFILE, blank_png_bytes, picture_bytes


@pytest.fixture
def image() -> Image:
    """The picture modality of the tiny profile."""
    return Image(PROFILE, LIMITS)


@pytest.mark.parametrize(("width", "height"), [(40, 24), (64, 64), (300, 200), (17, 90), (1000, 7), (1, 1)])
def test_image_patches_equal_those_of_transformers(image: Image, width: int, height: int) -> None:
    """After normalisation, bit for bit the pixel values of Qwen2VLImageProcessorPil."""
    from transformers import Qwen2VLImageProcessorPil

    theirs = Qwen2VLImageProcessorPil(
        patch_size=PROFILE.patch_size,
        merge_size=PROFILE.merge_size,
        temporal_patch_size=PROFILE.temporal_patch_size,
        min_pixels=PROFILE.min_pixels,
        max_pixels=PROFILE.max_pixels,
        image_mean=list(PROFILE.image_mean),
        image_std=list(PROFILE.image_std),
    )
    data = picture_bytes(width, height)
    expected = theirs([PilImage.open(io.BytesIO(data))], return_tensors="np")
    encoded = image.encode(image.decode(data))
    normalised = (encoded["patches"].astype(np.float32) / 255 - 0.5) / 0.5
    assert np.array_equal(normalised, expected["pixel_values"])
    assert encoded["grid_thw"].tolist() == expected["image_grid_thw"][0].tolist()


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_image_decodes_the_usual_formats(image: Image, file_format: str) -> None:
    """Each gives RGB bytes of the picture's size."""
    decoded = image.decode(picture_bytes(20, 10, file_format))
    assert (decoded.shape, decoded.dtype) == ((10, 20, 3), np.uint8)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_image_decodes_any_colour_mode_to_rgb(image: Image, mode: str) -> None:
    """Grey, palette, transparent and print pictures become RGB."""
    buffer = io.BytesIO()
    PilImage.new(mode, (6, 4), 1).save(buffer, "TIFF")
    assert image.decode(buffer.getvalue()).shape == (4, 6, 3)


def test_image_scales_sixteen_bits_to_eight(image: Image) -> None:
    """A 16-bit grey keeps its brightness; Pillow alone would clip it to white."""
    buffer = io.BytesIO()
    PilImage.fromarray(np.full((2, 2), 0x8000, np.uint16)).save(buffer, "PNG")
    assert image.decode(buffer.getvalue()).tolist() == [[[128] * 3] * 2] * 2


def test_image_obeys_the_orientation_note(image: Image) -> None:
    """A picture that a camera stored lying down stands up."""
    buffer, notes = io.BytesIO(), PilImage.Exif()
    notes[0x0112] = 6
    PilImage.new("RGB", (8, 4)).save(buffer, "JPEG", exif=notes)
    assert image.decode(buffer.getvalue()).shape == (8, 4, 3)


def test_image_refuses_a_hundred_megapixels_without_decoding(image: Image) -> None:
    """The header is enough; memory stays small."""
    data = blank_png_bytes(10_000, 10_000)
    tracemalloc.start()
    try:
        with pytest.raises(MediaLimitError) as caught:
            image.decode(data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(caught.value) == (
        "picture must have at most 64000000 pixels, got 100000000 (10000x10000); "
        "scale it down or raise modalities.limits.max_pixels"
    )
    assert peak_bytes < 1 << 20


def test_image_opens_a_hundred_megapixels_if_allowed() -> None:
    """Pillow's own warning about large pictures does not leak."""
    picture = open_picture(blank_png_bytes(10_000, 10_000), MediaLimits(max_pixels=200_000_000))
    assert picture.size == (10_000, 10_000)


def test_image_refuses_what_pillow_calls_a_bomb(image: Image) -> None:
    """Beyond Pillow's hard limit the refusal is ours too."""
    with pytest.raises(MediaLimitError, match=r"^picture must have at most 64000000 pixels: "):
        image.decode(blank_png_bytes(20_000, 20_000))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "picture must have bytes, got an empty file"),
        (
            b"These are words.",
            "picture must be one of PNG, JPEG, WEBP, BMP, GIF, TIFF, got 16 bytes that begin with b'These ar'",
        ),
    ],
)
def test_image_says_why_it_cannot_read(image: Image, data: bytes, message: str) -> None:
    """Empty files and text with a picture's name are named as such."""
    with pytest.raises(CorruptMediaError) as caught:
        image.decode(data)
    assert str(caught.value) == message


def test_image_refuses_a_jpeg_that_breaks_off(image: Image) -> None:
    """Half a picture is not shown to the model as a whole one."""
    data = picture_bytes(200, 200, "JPEG")
    with pytest.raises(CorruptMediaError, match=r"^picture must be whole, got JPEG that breaks off: "):
        image.decode(data[: len(data) // 2])


def test_image_refuses_extreme_aspect_ratios(image: Image) -> None:
    """Beyond 200 to 1 the model's own rule says no."""
    with pytest.raises(CorruptMediaError, match=r"^aspect ratio must be at most 200, got 300 "):
        image.encode(np.zeros((300, 1, 3), np.uint8))


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "GIF", "TIFF", "WEBP"])
def test_image_turns_any_damage_into_its_own_error(image: Image, file_format: str) -> None:
    """Changed, missing and added bytes end as a MediaError or as a picture, never as anything else."""
    whole, rng = picture_bytes(16, 16, file_format), np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), 4):
            damaged[place] = rng.integers(256)
        cut = bytes(damaged[: rng.integers(1, len(whole) + 1)]) if rng.random() < 0.3 else bytes(damaged)
        try:
            image.decode(cut)
        except (CorruptMediaError, MediaLimitError):
            continue
