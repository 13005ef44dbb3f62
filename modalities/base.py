"""What a modality is: columns, and the four verbs between a file's bytes and Arrow. Pure numpy and pyarrow.

    bytes --decode--> array --encode--> Encoded --to_arrow--> columns --from_arrow--> Encoded

`decode` is bounded by `MediaLimits` before memory is spent; `encode` does the arithmetic of the model's own
processor, with the numbers of an `EncodingProfile`. A modality serves one *tower* of the model: what it encodes
has that tower's keys, so that a new kind of file can feed a tower that exists.

Encoded keys by tower:
    image  patches uint8 [num_patches, 3 * temporal_patch * patch * patch], grid_thw int32 [3]
    video  the same two, and second_per_grid float32 []
    audio  features float32 [num_mel_bins, num_frames]
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from flight.schema import Column
from modalities.errors import MediaLimitError
from modalities.profile import EncodingProfile, Tower

__all__ = ["Encoded", "EncodingProfile", "MediaLimits", "Modality", "Tower", "num_audio_tokens"]

Encoded = dict[str, np.ndarray]
"""Arrays of one media item, by the tower's key; see the module's docstring."""


@dataclass(kw_only=True)
class MediaLimits:
    """What a single media file may cost before it is refused."""

    max_bytes: int = 256 << 20
    """Size of the file in bytes."""
    max_pixels: int = 64_000_000
    """Width times height of a picture or of a film's frame, as its header says."""
    max_frames: int = 36_000
    """Frames of a film before sampling."""
    max_seconds: float = 600.0
    """Length of a clip or film in seconds."""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_pixels", "max_frames", "max_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"modalities.limits: {name} must be positive, got {getattr(self, name)}")

    def check_bytes(self, num_bytes: int) -> None:
        """Raise MediaLimitError if the file is too large."""
        if num_bytes > self.max_bytes:
            raise MediaLimitError(
                f"file must have at most {self.max_bytes} bytes, got {num_bytes}; "
                "shrink it or raise modalities.limits.max_bytes"
            )

    def check_pixels(self, width: int, height: int) -> None:
        """Raise MediaLimitError if a picture or frame of that size is too large."""
        if width * height > self.max_pixels:
            raise MediaLimitError(
                f"picture must have at most {self.max_pixels} pixels, got {width * height} ({width}x{height}); "
                "scale it down or raise modalities.limits.max_pixels"
            )

    def check_frames(self, num_frames: int) -> None:
        """Raise MediaLimitError if a film has too many frames."""
        if num_frames > self.max_frames:
            raise MediaLimitError(
                f"film must have at most {self.max_frames} frames, got {num_frames}; "
                "cut it or raise modalities.limits.max_frames"
            )

    def check_seconds(self, seconds: float) -> None:
        """Raise MediaLimitError if a clip or film lasts too long."""
        if seconds > self.max_seconds:
            raise MediaLimitError(
                f"clip must last at most {self.max_seconds:g} s, got {seconds:.1f} s; "
                "cut it or raise modalities.limits.max_seconds"
            )


class Modality(ABC):
    """One kind of media. Stateless after construction; safe to use from several threads.

    A subclass sets `name` (an identifier; its columns start with it), `placeholder` (what a question's text holds
    where the media belongs, such as `<image>`) and `tower`, and implements the methods below. It raises `version`
    whenever it makes other arrays of the same bytes than before.
    """

    name: ClassVar[str]
    placeholder: ClassVar[str]
    tower: ClassVar[Tower]
    version: ClassVar[int] = 1

    def __init__(self, profile: EncodingProfile, limits: MediaLimits) -> None:
        self.profile = profile
        self.limits = limits

    def identity(self) -> str:
        """Return what decides, beside a file's bytes, which arrays they become: class, version and profile.

        Two that differ never share stored media. A subclass with settings of its own adds them to what this returns.
        """
        kind = type(self)
        numbers = json.dumps(asdict(self.profile), sort_keys=True)
        return f"{kind.__module__}:{kind.__qualname__} {self.name} {self.tower} {self.version} {numbers}"

    @abstractmethod
    def columns(self) -> tuple[Column, ...]:
        """Return the columns of this modality: nullable, with names that start with `{name}_`."""

    @abstractmethod
    def decode(self, data: bytes) -> Any:
        """Return what `encode` takes, usually an array.

        Raises:
            MediaLimitError: the file costs more than `limits` allow; found before the memory is spent.
            CorruptMediaError: the bytes are damaged or of another format.
        """

    @abstractmethod
    def encode(self, array: Any) -> Encoded:
        """Return the tower's arrays for one decoded item.

        Raises:
            MediaError: the item has a size or values that the model cannot take.
        """

    @abstractmethod
    def num_tokens(self, encoded: Encoded) -> int:
        """Return how many placeholder tokens the item takes in the prompt."""

    @abstractmethod
    def to_arrow(self, rows: Sequence[Sequence[Encoded]]) -> dict[str, pa.Array]:
        """Return the columns for `rows`, each a list of items; an empty list becomes null in every column."""

    @abstractmethod
    def from_arrow(self, columns: pa.Table | pa.RecordBatch) -> list[list[Encoded]]:
        """Return what was given to `to_arrow`, as read-only views of the Arrow buffers; null becomes an empty list."""


def num_audio_tokens(num_frames: int, rule: str = "qwen3_omni") -> int:
    """Return the audio tower's tokens for `num_frames` log-mel frames.

    `qwen3_omni`: the tower cuts the frames into blocks of 100 and halves each block three times (rounding up): 13
    tokens for a full block. `qwen2_5_omni`: it halves them once rounding up, and once more rounding down.

    Source: the audio encoders of Qwen3-Omni (three convolutions of stride 2 over windows of 100 frames) and of
    Qwen2.5-Omni (one convolution of stride 2, then pairs averaged).
    """
    if rule == "qwen2_5_omni":
        return (num_frames + 1) // 2 // 2
    blocks, rest = divmod(num_frames, 100)
    for _ in range(3):
        rest = (rest + 1) // 2
    return blocks * 13 + rest


def tower_of(encoded: Mapping[str, np.ndarray]) -> Tower:
    """Return the tower whose keys `encoded` has."""
    if "features" in encoded:
        return "audio"
    return "video" if "second_per_grid" in encoded else "image"


def num_encoded_tokens(tower: Tower, encoded: Mapping[str, np.ndarray], profile: EncodingProfile) -> int:
    """Return how many placeholder tokens `encoded` takes in `tower`; what every `num_tokens` has to equal."""
    if tower == "audio":
        return num_audio_tokens(encoded["features"].shape[1], profile.audio_rule)
    return int(np.prod(encoded["grid_thw"], dtype=np.int64)) // profile.merge_size**2
