"""The depth modality keeps the promises of a modality and reads millimetres."""

from __future__ import annotations

import io

import numpy as np
import pytest
from depth_modality.depth import Depth
from PIL import Image

from modalities.base import EncodingProfile, MediaLimits
from modalities.conformance import check_modality
from modalities.errors import CorruptMediaError


def depth_png(millimetres: np.ndarray) -> bytes:
    """Return a 16-bit PNG."""
    buffer = io.BytesIO()
    Image.fromarray(millimetres.astype(np.uint16)).save(buffer, "PNG")
    return buffer.getvalue()


def slope(height: int, width: int) -> np.ndarray:
    """Return a plane that recedes to the right."""
    return np.tile(np.linspace(0, 9000, width), (height, 1))


def test_depth_keeps_the_promises_of_a_modality() -> None:
    """The conformance kit finds nothing."""
    check_modality(Depth, [depth_png(slope(64, 96)), depth_png(slope(33, 47))])


def test_depth_decodes_millimetres() -> None:
    """What was written is read, to the millimetre."""
    written = slope(8, 8).astype(np.uint16)
    assert np.array_equal(Depth(EncodingProfile(), MediaLimits()).decode(depth_png(written)), written)


def test_depth_refuses_a_colour_picture() -> None:
    """An 8-bit picture is no depth map, and the message says so."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    with pytest.raises(CorruptMediaError, match=r"got mode 'RGB'$"):
        Depth(EncodingProfile(), MediaLimits()).decode(buffer.getvalue())
