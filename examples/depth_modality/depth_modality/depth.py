"""Depth maps as 16-bit PNG files in millimetres, 0 where nothing was measured, shown to the vision tower.

Three channels take the place of red, green and blue: nearness, nearness on a logarithmic scale, and whether the
pixel was measured. Columns, token counts and Arrow come from `VisualModality`.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from modalities.base import Encoded, Tower
from modalities.errors import CorruptMediaError
from modalities.image import DAMAGE, open_picture, resize
from modalities.visual import VisualModality, patchify

NEAREST_MM = 200.0
FARTHEST_MM = 10_000.0


class Depth(VisualModality):
    """Reads `<depth>` placeholders and the `depths` list of a manifest."""

    name: ClassVar[str] = "depth"
    placeholder: ClassVar[str] = "<depth>"
    tower: ClassVar[Tower] = "image"

    def decode(self, data: bytes) -> np.ndarray:
        """Return millimetres, uint16 [height, width]."""
        picture = open_picture(data, self.limits)
        if picture.mode != "I;16":
            raise CorruptMediaError(
                f"depth map must be a PNG with one 16-bit channel, got mode {picture.mode!r}"
            )
        try:
            return np.asarray(picture).astype(np.uint16)
        except DAMAGE as error:
            raise CorruptMediaError(f"depth map must be whole, got one that breaks off: {error}") from error

    def encode(self, array: np.ndarray) -> Encoded:
        """Colour the depths and cut them into patches."""
        measured = array > 0
        clipped = np.clip(array, NEAREST_MM, FARTHEST_MM)
        near = 1 - (clipped - NEAREST_MM) / (FARTHEST_MM - NEAREST_MM)
        near_log = 1 - np.log(clipped / NEAREST_MM) / np.log(FARTHEST_MM / NEAREST_MM)
        channels = np.stack([near * measured, near_log * measured, measured], axis=2)
        frame = np.round(channels * 255).astype(np.uint8)
        return patchify(
            resize(frame, self.profile, self.profile.min_pixels, self.profile.max_pixels)[None], self.profile
        )
