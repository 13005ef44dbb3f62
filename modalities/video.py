"""Films: MP4, MOV, WebM, Matroska, AVI and MPEG through PyAV, to patches of sampled frames. The one home of PyAV.

A film is decoded once, in order; only the sampled frames are converted, each brought to the model's size at once,
so that memory is bounded by the profile and not by the film. The sound track is ignored here; the audio modality
reads it when a question holds `<audio>` with the path of a film.

A film of which a sampled frame is missing or damaged is refused: it is never padded with what was decoded.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import av
import numpy as np
import pyarrow as pa

from flight.schema import Column
from modalities.base import Encoded, EncodingProfile, MediaLimits
from modalities.errors import CorruptMediaError, MediaLimitError, ModalityError
from modalities.image import check_frames, resize
from modalities.packing import pack_list, unpack_list
from modalities.profile import Tower
from modalities.visual import VisualModality, patchify

OPTIONS = {
    "format_whitelist": "mov,matroska,avi,mpegts,mpeg,flv,ogg,asf,m4v,h264,hevc",
    "protocol_whitelist": "",
}
"""Container formats that are read; play lists, which open other files, are not, and nothing is opened by name."""


class Film(NamedTuple):
    """Decoded frames, uint8 [num_frames, height, width, 3], and how many of them make a second."""

    frames: np.ndarray
    fps: float


class Video(VisualModality):
    """Films for the vision tower."""

    name: ClassVar[str] = "video"
    placeholder: ClassVar[str] = "<video>"
    tower: ClassVar[Tower] = "video"

    def columns(self) -> tuple[Column, ...]:
        seconds = Column(
            name=f"{self.name}_second_per_grid",
            type=pa.list_(pa.float32()),
            meaning=f"time that one temporal patch of each {self.name} item covers",
            unit="seconds",
            shape="[num_items]",
            writer="preprocess",
            nullable=True,
        )
        return (*super().columns(), seconds)

    def decode(self, data: bytes) -> Film:
        """Return the sampled frames at the size that the model wants."""
        with _opened(data) as container:
            if not container.streams.video:
                raise CorruptMediaError(f"film must have a video stream, got {_stream_types(container)}")
            num_frames, fps = _measure(container, self.limits)
        indices = sample_indices(num_frames, fps, self.profile)
        with _opened(data) as container:
            frames = list(self._sampled(container, indices))
        shape = frames[0].shape
        if len(frames) < len(indices) or any(frame.shape != shape for frame in frames):
            raise CorruptMediaError(
                f"film must be whole and of one size, got {len(frames)} of {len(indices)} sampled frames; "
                "encode it again"
            )
        return Film(np.stack(frames), fps * len(indices) / num_frames)

    def encode(self, array: Film) -> Encoded:
        """Cut the frames into patches, resized if they do not fit; shapes as `modalities.base` says."""
        check_frames(array.frames, self.name)
        if not 0 < array.fps < float("inf"):
            raise CorruptMediaError(f"film must have a positive frame rate, got {array.fps}")
        frames = np.stack([self._resize(frame, len(array.frames)) for frame in array.frames])
        seconds = np.array(self.profile.temporal_patch_size / array.fps, np.float32)
        return {**patchify(frames, self.profile), "second_per_grid": seconds}

    def to_arrow(self, rows: Sequence[Sequence[Encoded]]) -> dict[str, pa.Array]:
        seconds = pack_list([[item["second_per_grid"] for item in row] for row in rows], pa.float32())
        return super().to_arrow(rows) | {f"{self.name}_second_per_grid": seconds}

    def from_arrow(self, columns: pa.Table | pa.RecordBatch) -> list[list[Encoded]]:
        rows = super().from_arrow(columns)
        all_seconds = unpack_list(columns[f"{self.name}_second_per_grid"])
        for items, seconds in zip(rows, all_seconds, strict=True):
            for number, item in enumerate(items):
                if seconds is None or len(seconds) != len(items):
                    raise ModalityError(
                        f"{self.name}_second_per_grid must hold {len(items)} numbers, got {seconds}"
                    )
                item["second_per_grid"] = seconds[number : number + 1].reshape(())
        return rows

    def _resize(self, frame_HWC: np.ndarray, num_frames: int) -> np.ndarray:
        """Bring one of so many frames to the model's size."""
        sharing = num_frames if self.profile.film_in_frames else 1
        least, most = self.profile.video_min_pixels / sharing, self.profile.video_max_pixels / sharing
        return resize(frame_HWC, self.profile, least, most)

    def _sampled(self, container: Any, indices: np.ndarray) -> Iterator[np.ndarray]:
        wanted = iter(indices.tolist())
        following = next(wanted)
        for number, frame in enumerate(_decoded(container, container.streams.video[0], self.limits)):
            if number < following:
                continue
            if frame.is_corrupt:
                raise CorruptMediaError(f"film must be whole, got damage in frame {number}; encode it again")
            self.limits.check_pixels(frame.width, frame.height)
            picture = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
            yield self._resize(picture, len(indices))
            following = next(wanted, -1)
            if following < 0:
                return
        raise CorruptMediaError(f"film must be whole, got no frame {following}; encode it again")


def sample_indices(num_frames: int, fps: float, profile: EncodingProfile) -> np.ndarray:
    """Return which frames to sample, evenly spread: the profile's rate within its least and most frames.

    A film shorter than one temporal patch is taken whole.

    Source: the frame sampling of the Qwen2-VL video processor.
    """
    temporal = profile.temporal_patch_size
    if num_frames < temporal:
        return np.arange(num_frames)
    most = min(profile.video_max_frames, num_frames) // temporal * temporal
    wanted = min(max(num_frames / fps * profile.video_fps, profile.video_min_frames), most, num_frames)
    count = max(int(wanted) // temporal * temporal, temporal)
    return (np.arange(count) * (num_frames / count)).astype(np.int64)


def decode_sound_track(data: bytes, limits: MediaLimits) -> tuple[np.ndarray, int]:
    """Return the first sound track as mono float32 samples, and its rate in Hz.

    Raises:
        CorruptMediaError: there is no sound track, or it is damaged.
        MediaLimitError: it lasts longer than allowed.
    """
    pieces: list[np.ndarray] = []
    num_samples = 0
    with _opened(data) as container:
        if not container.streams.audio:
            raise CorruptMediaError(f"sound must have an audio stream, got {_stream_types(container)}")
        stream = container.streams.audio[0]
        rate_hz = int(stream.rate or 0)
        if rate_hz <= 0:
            raise CorruptMediaError(f"sound must have a positive rate, got {rate_hz} Hz")
        limits.check_seconds(float((stream.duration or 0) * (stream.time_base or Fraction(0))))
        # Only the sample format changes here: PyAV's resampler is another filter than soxr.
        planar = av.AudioResampler(format="fltp")
        for frame in itertools.chain(_decoded(container, stream, limits), [None]):
            for part in planar.resample(frame):
                pieces.append(part.to_ndarray().mean(axis=0))
                num_samples += part.samples
                limits.check_seconds(num_samples / rate_hz)
    return (np.concatenate(pieces) if pieces else np.empty(0, np.float32)), rate_hz


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """Yield the open container; whatever PyAV raises inside the block becomes a CorruptMediaError."""
    if not data:
        raise CorruptMediaError("film must have bytes, got an empty file")
    try:
        with av.open(io.BytesIO(data), mode="r", options=OPTIONS) as container:
            yield container
    except (CorruptMediaError, MediaLimitError):
        raise
    except (
        av.error.FFmpegError,
        ValueError,
        TypeError,
        OSError,
        RuntimeError,
        MemoryError,
        LookupError,
    ) as error:
        reason = getattr(error, "strerror", None) or error
        raise CorruptMediaError(
            f"film must be MP4, MOV, WebM, Matroska, AVI or MPEG, whole, got: {reason}"
        ) from error


def _measure(container: Any, limits: MediaLimits) -> tuple[int, float]:
    """Return the number of frames and frames a second, by counting packets: headers may be silent or lie."""
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise CorruptMediaError("film must be of a codec that PyAV decodes, got an unknown one")
    limits.check_pixels(stream.codec_context.width, stream.codec_context.height)
    limits.check_frames(stream.frames)
    num_frames = 0
    for packet in container.demux(stream):
        if packet.size and not packet.is_discard:
            num_frames += 1
            limits.check_frames(num_frames)
    if not num_frames or num_frames < stream.frames:
        raise CorruptMediaError(
            f"film must be whole, got {num_frames} of {stream.frames} frames; encode it again"
        )
    fps = float(stream.average_rate or stream.base_rate or 0)
    if fps <= 0:
        raise CorruptMediaError(f"film must have a positive frame rate, got {fps}")
    limits.check_seconds(num_frames / fps)
    return num_frames, fps


def _decoded(container: Any, stream: Any, limits: MediaLimits) -> Iterator[Any]:
    if stream.type == "video":
        # One thread: a preprocess service is one of several, and frames come in the same order everywhere.
        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1
        stream.codec_context.options = {"max_pixels": str(limits.max_pixels)}
    yield from container.decode(stream)


def _stream_types(container: Any) -> str:
    return ", ".join(sorted({stream.type for stream in container.streams})) or "no stream at all"
