"""Pictures: PNG, JPEG, WebP, BMP, GIF and TIFF through Pillow, to patches. The one home of Pillow.

The first frame of an animated file counts. Orientation notes (EXIF) are obeyed. Transparency is dropped, as the
model's own processor drops it.
"""

from __future__ import annotations

import io
import struct
import threading
import warnings
import zlib
from typing import ClassVar

import numpy as np
import PIL.Image
import PIL.ImageOps

from modalities.base import Encoded, EncodingProfile, MediaLimits
from modalities.errors import CorruptMediaError, MediaLimitError
from modalities.profile import Tower
from modalities.visual import VisualModality, fit_size, patchify

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""Formats that are tried; those that start other programs or read other files (EPS, ...) are not."""

DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    MemoryError,
    struct.error,
    zlib.error,
    PIL.Image.DecompressionBombError,
    Warning,
)
"""What Pillow raises on damaged files, each seen or documented; `Warning` where warnings are errors."""

_open_lock = threading.Lock()


class Image(VisualModality):
    """Pictures for the vision tower."""

    name: ClassVar[str] = "image"
    placeholder: ClassVar[str] = "<image>"
    tower: ClassVar[Tower] = "image"

    def decode(self, data: bytes) -> np.ndarray:
        """Return the picture as uint8 [height, width, 3]."""
        picture = open_picture(data, self.limits)
        try:
            turned = PIL.ImageOps.exif_transpose(picture)
            if turned.mode.startswith("I;16"):
                return np.repeat((np.asarray(turned) >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
            return np.asarray(turned.convert("RGB"))
        except DAMAGE as error:
            raise CorruptMediaError(
                f"picture must be whole, got {picture.format} that breaks off: {error}"
            ) from error

    def encode(self, array: np.ndarray) -> Encoded:
        """Resize (bicubic) and cut into patches; shapes as `modalities.base` says."""
        check_frames(array[None], self.name)
        profile = self.profile
        return patchify(resize(array, profile, profile.min_pixels, profile.max_pixels)[None], profile)


def open_picture(data: bytes, limits: MediaLimits) -> PIL.Image.Image:
    """Return the picture with only its header read.

    Raises:
        CorruptMediaError: the bytes are empty or of no known format.
        MediaLimitError: the header announces more pixels than allowed.
    """
    if not data:
        raise CorruptMediaError("picture must have bytes, got an empty file")
    # The lock guards the process-wide warning filters; only the header is read under it.
    with _open_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
        try:
            picture = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
        except PIL.Image.DecompressionBombError as error:
            raise MediaLimitError(
                f"picture must have at most {limits.max_pixels} pixels: {error}; scale it down"
            ) from error
        except PIL.Image.UnidentifiedImageError as error:
            formats = ", ".join(FORMATS)
            raise CorruptMediaError(f"picture must be one of {formats}, got {_beginning(data)}") from error
        except DAMAGE as error:
            raise CorruptMediaError(
                f"picture must have a whole header, got one that breaks off: {error}"
            ) from error
    limits.check_pixels(*picture.size)
    return picture


def resize(
    frame_HWC: np.ndarray, profile: EncodingProfile, min_pixels: float, max_pixels: float
) -> np.ndarray:
    """Return the frame at the size that the model wants, by Pillow's bicubic filter; unchanged if it fits already."""
    height, width = frame_HWC.shape[:2]
    fitted = fit_size(height, width, profile.resize_factor, min_pixels, max_pixels)
    if fitted == (height, width):
        return frame_HWC
    picture = PIL.Image.fromarray(np.ascontiguousarray(frame_HWC))
    return np.asarray(picture.resize((fitted[1], fitted[0]), PIL.Image.Resampling.BICUBIC))


def check_frames(frames_THWC: np.ndarray, where: str) -> None:
    """Refuse what is no stack of RGB frames.

    Raises:
        CorruptMediaError: not uint8 [num_frames, height, width, 3] with something in it.
    """
    if (
        frames_THWC.ndim != 4
        or frames_THWC.shape[3] != 3
        or frames_THWC.dtype != np.uint8
        or not frames_THWC.size
    ):
        raise CorruptMediaError(
            f"{where}: frames must be uint8 [num_frames, height, width, 3], "
            f"got {frames_THWC.dtype} {list(frames_THWC.shape)}"
        )


def _beginning(data: bytes) -> str:
    return f"{len(data)} bytes that begin with {data[:8]!r}"
