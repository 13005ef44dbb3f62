"""Sound: WAV, FLAC, MP3 and Ogg through libsndfile, the sound track of an MP4 through PyAV, to log-mel frames.

The one home of soundfile, soxr and librosa. Decoding and resampling (soxr "HQ") are what librosa.load does, without
its import; the features are those of the Whisper extractor, without padding to 30 s.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np
import pyarrow as pa
import soundfile
import soxr

from flight.schema import Column
from modalities.base import Encoded, MediaLimits, Modality, num_audio_tokens
from modalities.errors import CorruptMediaError, MediaError, MediaLimitError, ModalityError
from modalities.packing import pack_list, unpack_list
from modalities.profile import EncodingProfile, Tower

MAX_CHANNELS = 64
MAX_RATE_HZ = 768_000
MEL_CEILING_HZ = 8_000.0
"""The Whisper filters end here whatever the sampling rate."""
LOG_FLOOR = 1e-10
DYNAMIC_RANGE = 8.0
"""Powers of ten below the loudest value that are kept."""
MISSING_S = 0.1
"""Seconds that an encoder's delay may take from the length that the header announces."""
STREAMED_BYTES = 0x7FFFF000
"""A WAV that was written to a pipe announces at least this much data; its length is then unknown, not wrong."""
_CUT_WAV = re.compile(r"^data *: (\d+) \(should be (\d+)\)", re.MULTILINE)


class Audio(Modality):
    """Sound for the audio tower."""

    name: ClassVar[str] = "audio"
    placeholder: ClassVar[str] = "<audio>"
    tower: ClassVar[Tower] = "audio"

    def columns(self) -> tuple[Column, ...]:
        return (
            Column(
                name=f"{self.name}_features",
                type=pa.list_(pa.float32()),
                meaning=f"log-mel frames of all {self.name} items of the row, item after item, each row-major",
                unit="scaled log10 of power",
                shape=f"[{self.profile.num_mel_bins}, num_frames] for each item",
                writer="preprocess",
                nullable=True,
            ),
            Column(
                name=f"{self.name}_num_frames",
                type=pa.list_(pa.int32()),
                meaning=f"length of each {self.name} item",
                unit=f"frames of {self.profile.hop_length_samples} samples",
                shape="[num_items]",
                writer="preprocess",
                nullable=True,
            ),
        )

    def decode(self, data: bytes) -> np.ndarray:
        """Return mono samples, float32 [num_samples], at the profile's sampling rate."""
        if not data:
            raise CorruptMediaError("sound must have bytes, got an empty file")
        if is_container(data):
            from modalities.video import decode_sound_track  # PyAV is needed for sound tracks only

            samples, rate_hz = decode_sound_track(data, self.limits)
        else:
            samples, rate_hz = _read_sound(data, self.limits)
        _check_samples(samples)
        return resample(samples, rate_hz, self.profile.sampling_rate_hz)

    def encode(self, array: np.ndarray) -> Encoded:
        """Return the log-mel features, float32 [num_mel_bins, num_frames]."""
        least = max(self.profile.n_fft_samples // 2 + 1, self.profile.hop_length_samples)
        if array.ndim != 1 or array.size < least:
            raise CorruptMediaError(
                f"sound must have at least {least} mono samples at {self.profile.sampling_rate_hz} Hz, "
                f"got shape {list(array.shape)}"
            )
        _check_samples(array)
        profile = self.profile
        filters = mel_filters(profile.num_mel_bins, profile.n_fft_samples, profile.sampling_rate_hz)
        return {"features": log_mel(array, profile, filters)}

    def num_tokens(self, encoded: Encoded) -> int:
        return num_audio_tokens(encoded["features"].shape[1], self.profile.audio_rule)

    def to_arrow(self, rows: Sequence[Sequence[Encoded]]) -> dict[str, pa.Array]:
        lengths = [[np.array([item["features"].shape[1]], np.int32) for item in row] for row in rows]
        return {
            f"{self.name}_features": pack_list(
                [[item["features"] for item in row] for row in rows], pa.float32()
            ),
            f"{self.name}_num_frames": pack_list(lengths, pa.int32()),
        }

    def from_arrow(self, columns: pa.Table | pa.RecordBatch) -> list[list[Encoded]]:
        flat = unpack_list(columns[f"{self.name}_features"])
        lengths = unpack_list(columns[f"{self.name}_num_frames"])
        return [self._items(values, frames) for values, frames in zip(flat, lengths, strict=True)]

    def _items(self, values: np.ndarray | None, num_frames: np.ndarray | None) -> list[Encoded]:
        if values is None or num_frames is None:
            return []
        bins = self.profile.num_mel_bins
        if int(num_frames.sum()) * bins != len(values):
            raise ModalityError(
                f"{self.name}_features must hold {int(num_frames.sum())} frames of {bins} bands, "
                f"got {len(values)} values; the row was encoded for another model"
            )
        pieces = np.split(values, np.cumsum(num_frames[:-1]) * bins)
        return [{"features": piece.reshape(bins, -1)} for piece in pieces]


def is_container(data: bytes) -> bool:
    """Tell whether the bytes are an MP4 or Matroska container, whose sound track libsndfile cannot read."""
    return data[4:8] == b"ftyp" or data[:4] == b"\x1aE\xdf\xa3"


def resample(samples: np.ndarray, rate_hz: int, wanted_hz: int) -> np.ndarray:
    """Return the samples at another rate; ceil(num_samples * wanted / rate) of them, as librosa.load returns."""
    if rate_hz == wanted_hz:
        return samples
    length = math.ceil(len(samples) * wanted_hz / rate_hz)
    resampled = soxr.resample(samples, rate_hz, wanted_hz, quality="HQ")[:length]
    return np.pad(resampled, (0, length - len(resampled))).astype(np.float32, copy=False)


def log_mel(samples: np.ndarray, profile: EncodingProfile, filters: np.ndarray) -> np.ndarray:
    """Return the log-mel spectrogram, float32 [num_mel_bins, num_samples // hop].

    Power spectrum of Hann windows centred on each hop (edges reflected), slaney mel bands, log10, cut eight powers
    of ten below the loudest value, then (x + 4) / 4.

    Source: the Whisper feature extractor; the last frame is left out there too.
    """
    n_fft, hop = profile.n_fft_samples, profile.hop_length_samples
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n_fft) / n_fft)).astype(np.float32)
    padded = np.pad(samples.astype(np.float32, copy=False), n_fft // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, n_fft)[::hop][: len(samples) // hop]
    spectrum = np.fft.rfft(frames * window, axis=1)
    power = np.square(spectrum.real) + np.square(spectrum.imag)
    # Not `@`: OpenBLAS wakes all its threads for a product this small and takes a hundred times as long.
    mel = np.einsum("tf,fm->tm", power.astype(np.float32, copy=False), filters)
    logs = np.log10(np.maximum(mel, LOG_FLOOR))
    logs = np.maximum(logs, logs.max() - DYNAMIC_RANGE)
    return np.ascontiguousarray(((logs + 4.0) / 4.0).T, np.float32)


@lru_cache(maxsize=8)
def mel_filters(num_mel_bins: int, n_fft: int, rate_hz: int) -> np.ndarray:
    """Return librosa's triangular mel filters of equal area (Slaney), float32 [n_fft // 2 + 1, num_mel_bins]."""
    import librosa  # seconds when its caches are cold: only where sound is encoded

    filters = librosa.filters.mel(
        sr=rate_hz, n_fft=n_fft, n_mels=num_mel_bins, fmin=0.0, fmax=MEL_CEILING_HZ, htk=False, norm="slaney"
    )
    filters = np.ascontiguousarray(filters.T, np.float32)
    filters.setflags(write=False)
    return filters


def _read_sound(data: bytes, limits: MediaLimits) -> tuple[np.ndarray, int]:
    """Return mono samples and their rate; the header is checked first and never trusted with more than the limit."""
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            rate_hz, channels = sound.samplerate, sound.channels
            if not 0 < rate_hz <= MAX_RATE_HZ or not 0 < channels <= MAX_CHANNELS:
                raise MediaLimitError(
                    f"sound must have at most {MAX_CHANNELS} channels and {MAX_RATE_HZ} Hz, "
                    f"got {channels} channels at {rate_hz} Hz"
                )
            limits.check_seconds(sound.frames / rate_hz)
            samples = sound.read(int(limits.max_seconds * rate_hz) + 1, dtype="float32", always_2d=True)
            _check_whole(len(samples), sound)
    except (soundfile.LibsndfileError, RuntimeError, ValueError, TypeError, OSError, MemoryError) as error:
        if isinstance(error, MediaError):
            raise
        raise CorruptMediaError(
            f"sound must be WAV, FLAC, MP3, Ogg or an MP4 with sound, got {len(data)} bytes that are not: "
            f"{getattr(error, 'error_string', error)}"
        ) from error
    limits.check_seconds(len(samples) / rate_hz)
    return (samples[:, 0] if channels == 1 else samples.mean(axis=1)), rate_hz


def _check_whole(num_samples: int, sound: soundfile.SoundFile) -> None:
    """Refuse a file that was cut off: libsndfile reads what is there and mentions the rest only in its log."""
    least = sound.frames - int(sound.samplerate * MISSING_S)
    cut = _CUT_WAV.search(sound.extra_info)
    if num_samples < least or (cut and int(cut[2]) < int(cut[1]) < STREAMED_BYTES):
        raise CorruptMediaError(
            f"sound must be whole, got {num_samples} samples of {sound.format} that breaks off; encode it again"
        )


def _check_samples(samples: np.ndarray) -> None:
    if not samples.size:
        raise CorruptMediaError("sound must have samples, got a file with none")
    if not np.isfinite(samples).all():
        count = int(samples.size - np.isfinite(samples).sum())
        raise CorruptMediaError(f"sound must have finite samples, got {count} that are NaN or infinite")
