"""Sound: librosa's samples and Whisper's features, and refusals."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import soxr

from modalities.audio import Audio, log_mel, mel_filters
from modalities.base import MediaLimits, num_audio_tokens
from modalities.errors import CorruptMediaError, MediaError, MediaLimitError
from tests.kit.media import LIMITS, PROFILE, film_bytes, sound_bytes, tone


@pytest.fixture
def audio() -> Audio:
    """The sound modality of the tiny profile."""
    return Audio(PROFILE, LIMITS)


@pytest.mark.parametrize("seconds", [0.0126, 0.1, 0.5, 1.003, 7.77, 30.0])
def test_audio_features_equal_those_of_transformers(audio: Audio, seconds: float) -> None:
    """Within 1e-4 of WhisperFeatureExtractor, and as many frames."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(
        feature_size=128, sampling_rate=16_000, hop_length=160, n_fft=400, chunk_length=300
    )
    samples = tone(seconds)
    expected = extractor(
        [samples],
        sampling_rate=16_000,
        padding=True,
        truncation=False,
        return_attention_mask=True,
        return_tensors="np",
    )
    features = audio.encode(samples)["features"]
    assert features.shape == expected["input_features"][0].shape
    assert features.shape[1] == expected["attention_mask"].sum()
    assert np.abs(features - expected["input_features"][0]).max() < 1e-4


def test_audio_token_counts_equal_those_of_transformers() -> None:
    """The number of placeholders for every length up to 50 s is that of the Qwen3-Omni processor."""
    from transformers.models.qwen3_omni_moe import processing_qwen3_omni_moe as theirs

    lengths = np.arange(1, 5000)
    expected = theirs._get_feat_extract_output_lengths(lengths)
    assert [num_audio_tokens(length) for length in lengths.tolist()] == expected.tolist()


def test_audio_mel_filters_equal_those_of_librosa() -> None:
    """The slaney filters that librosa computes, without its import."""
    from librosa.filters import mel

    expected = mel(sr=16_000, n_fft=400, n_mels=128, fmax=8_000)
    assert np.abs(mel_filters(128, 400, 16_000).T - expected).max() < 1e-7


@pytest.mark.parametrize(("rate_hz", "channels"), [(44_100, 2), (8_000, 1), (16_000, 2), (48_000, 1)])
def test_audio_samples_equal_those_of_librosa_load(audio: Audio, rate_hz: int, channels: int) -> None:
    """Channels are averaged and rates changed as librosa does it (soundfile, soxr HQ)."""
    sound = np.stack([tone(0.7, rate_hz, 440.0 * (number + 1)) for number in range(channels)], axis=1)
    data = sound_bytes(sound, rate_hz)
    decoded = audio.decode(data)
    pcm = np.clip(np.round(sound * 32768), -32768, 32767) / 32768
    mono = pcm.astype(np.float32).mean(axis=1)
    expected = soxr.resample(mono, rate_hz, 16_000, quality="HQ") if rate_hz != 16_000 else mono
    assert len(decoded) == math.ceil(len(sound) * 16_000 / rate_hz)
    assert np.abs(decoded[: len(expected)] - expected[: len(decoded)]).max() < 1e-4


@pytest.mark.filterwarnings("ignore:.*is deprecated and slated for removal:DeprecationWarning")
@pytest.mark.slow
def test_audio_samples_equal_librosa_itself(audio: Audio) -> None:
    """The same through librosa.load, which compiles for seconds on its first call."""
    import librosa

    data = sound_bytes(np.stack([tone(1, 44_100), tone(1, 44_100, 900.0)], axis=1), 44_100)
    assert np.array_equal(audio.decode(data), librosa.load(io.BytesIO(data), sr=16_000)[0])


@pytest.mark.parametrize("file_format", ["WAV", "FLAC", "MP3", "OGG", "AIFF"])
def test_audio_decodes_the_usual_formats(audio: Audio, file_format: str) -> None:
    """Each gives about as many samples as were written."""
    decoded = audio.decode(sound_bytes(tone(1.0), file_format=file_format))
    assert decoded.dtype == np.float32
    assert abs(len(decoded) - 16_000) < 1_600


def test_audio_decodes_the_sound_track_of_a_film(audio: Audio) -> None:
    """An MP4 given as sound yields its AAC track, loudest where the tone is."""
    decoded = audio.decode(film_bytes(sound=tone(2.0, hz=1_000.0)))
    spectrum = np.abs(np.fft.rfft(decoded))
    assert abs(len(decoded) - 32_000) < 2_048
    assert abs(np.fft.rfftfreq(len(decoded), 1 / 16_000)[spectrum.argmax()] - 1_000) < 2


def test_audio_silence_has_finite_features() -> None:
    """Silence is the floor of the logarithm, not minus infinity."""
    features = log_mel(np.zeros(1_600, np.float32), PROFILE, mel_filters(128, 400, 16_000))
    assert features.shape == (128, 10)
    assert np.abs(features + 1.5).max() < 1e-6


def _nan_sound() -> bytes:
    samples = tone()
    samples[7] = np.nan
    samples[9] = np.inf
    return sound_bytes(samples, subtype="FLOAT")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "sound must have bytes, got an empty file"),
        (sound_bytes(np.zeros(0, np.float32)), "sound must have samples, got a file with none"),
        (
            sound_bytes(tone())[:1000],
            "sound must be whole, got 478 samples of WAV that breaks off; encode it again",
        ),
        (
            b"These are words.",
            "sound must be WAV, FLAC, MP3, Ogg or an MP4 with sound, got 16 bytes that are not: "
            "Format not recognised.",
        ),
        (_nan_sound(), "sound must have finite samples, got 2 that are NaN or infinite"),
        (film_bytes(), "sound must have an audio stream, got video"),
    ],
)
def test_audio_says_why_it_cannot_read(audio: Audio, data: bytes, message: str) -> None:
    """Empty, cut, foreign and impossible files are named as such."""
    with pytest.raises(CorruptMediaError) as caught:
        audio.decode(data)
    assert str(caught.value) == message


@pytest.mark.parametrize("file_format", ["FLAC", "MP3"])
def test_audio_refuses_a_compressed_file_that_breaks_off(audio: Audio, file_format: str) -> None:
    """A file whose header promises more than follows is refused."""
    data = sound_bytes(tone(3.0), file_format=file_format)
    with pytest.raises(CorruptMediaError):
        audio.decode(data[: len(data) // 2])


def test_audio_accepts_a_wav_of_unknown_length(audio: Audio) -> None:
    """A WAV that was written to a pipe has no length in its header; what follows counts."""
    data = bytearray(sound_bytes(tone()))
    data[40:44] = b"\xff\xff\xff\xff"
    assert len(audio.decode(bytes(data))) == 8_000


def test_audio_refuses_a_clip_that_is_too_long() -> None:
    """The header's length is enough."""
    audio = Audio(PROFILE, MediaLimits(max_seconds=1.0))
    with pytest.raises(MediaLimitError) as caught:
        audio.decode(sound_bytes(tone(2.0)))
    assert (
        str(caught.value)
        == "clip must last at most 1 s, got 2.0 s; cut it or raise modalities.limits.max_seconds"
    )


def test_audio_refuses_a_clip_too_short_for_one_frame(audio: Audio) -> None:
    """Fewer samples than half a window have no spectrum."""
    with pytest.raises(CorruptMediaError) as caught:
        audio.encode(np.zeros(200, np.float32))
    assert str(caught.value) == "sound must have at least 201 mono samples at 16000 Hz, got shape [200]"


@pytest.mark.parametrize("file_format", ["WAV", "FLAC", "OGG"])
def test_audio_turns_any_damage_into_its_own_error(audio: Audio, file_format: str) -> None:
    """Changed bytes end as a MediaError or as sound, never as anything else."""
    whole, rng = sound_bytes(tone(0.1), file_format=file_format), np.random.default_rng(0)
    for _ in range(100):
        damaged = bytearray(whole)
        for place in rng.integers(0, min(len(whole), 200), 3):
            damaged[place] = rng.integers(256)
        try:
            audio.encode(audio.decode(bytes(damaged)))
        except MediaError:
            continue
