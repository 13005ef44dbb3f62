"""Films: which frames are sampled, how they are cut into patches, and what is refused."""

from __future__ import annotations

import io
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from modalities.base import EncodingProfile, MediaLimits
from modalities.errors import CorruptMediaError, MediaError, MediaLimitError
from modalities.video import Film, Video, sample_indices
from tests.kit.media import LIMITS, PROFILE, film_bytes, picture_bytes, sound_bytes, tone


@pytest.fixture
def video() -> Video:
    """The film modality of the tiny profile."""
    return Video(PROFILE, LIMITS)


@pytest.mark.parametrize("num_frames", [1, 2, 5, 8])
def test_video_patches_equal_those_of_transformers(video: Video, num_frames: int) -> None:
    """The patch order of the Qwen2-VL processors, the last frame repeated where it has to be."""
    from transformers import Qwen2VLImageProcessorPil

    frames = np.random.default_rng(0).integers(0, 256, (num_frames, 32, 48, 3), np.uint8)
    theirs = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, temporal_patch_size=2)
    expected = theirs._preprocess(
        [frames.transpose(0, 3, 1, 2)],
        do_resize=False,
        size=theirs.size,
        resample=None,
        do_rescale=False,
        rescale_factor=1.0,
        do_normalize=False,
        image_mean=None,
        image_std=None,
        patch_size=8,
        temporal_patch_size=2,
        merge_size=2,
        return_tensors=None,
    )
    encoded = video.encode(Film(frames, 4.0))
    assert np.array_equal(encoded["patches"], expected["pixel_values"])
    assert encoded["grid_thw"].tolist() == expected["image_grid_thw"][0].tolist()
    assert encoded["second_per_grid"] == np.float32(0.5)


def test_video_samples_the_frames_that_transformers_would() -> None:
    """The rule of the Qwen2-VL video processor, for many lengths and rates."""
    profile = EncodingProfile(video_fps=2.0, video_min_frames=4, video_max_frames=16)
    for num_frames in (*range(2, 40), 100, 301, 3000):
        for fps in (1.0, 4.0, 24.0, 29.97, 60.0):
            most = min(16, num_frames) // 2 * 2
            count = int(min(max(num_frames / fps * 2.0, 4), most, num_frames)) // 2 * 2
            expected = [int(place * num_frames / count) for place in range(count)]
            sampled = sample_indices(num_frames, fps, profile)
            assert np.abs(sampled - expected).max() <= 1e-9
            assert sampled[-1] < num_frames


def test_video_decodes_the_sampled_frames_in_order(video: Video) -> None:
    """A film that brightens is brighter from frame to frame; 4 of 16 frames a second are kept."""
    film = video.decode(film_bytes(32, fps=16))
    means = film.frames.mean(axis=(1, 2, 3))
    assert film.frames.shape == (8, 48, 64, 3)
    assert film.fps == 4.0
    assert (np.diff(means) > 10).all()


def test_video_takes_a_film_of_one_frame(video: Video) -> None:
    """Its frame is repeated to fill the temporal patch."""
    encoded = video.encode(video.decode(film_bytes(1)))
    assert encoded["grid_thw"].tolist() == [1, 6, 8]
    assert video.num_tokens(encoded) == 12


def test_video_ignores_the_sound_track(video: Video) -> None:
    """The same frames with and without it."""
    with_sound, without = video.decode(film_bytes(sound=tone(2.0))), video.decode(film_bytes())
    assert np.array_equal(with_sound.frames, without.frames)


def test_video_resizes_frames_to_the_models_size(video: Video) -> None:
    """A large film comes back at the profile's size, each edge a multiple of patch times merge."""
    film = video.decode(film_bytes(4, width=320, height=180))
    assert film.frames.shape == (4, 48, 80, 3)


def test_video_turns_films_that_were_stored_lying_down(video: Video) -> None:
    """The header of a phone's film says: turn a quarter clockwise. What was on top is then on the right."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        picture = np.zeros((48, 64, 3), np.uint8)
        picture[:24] = 255
        container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    data = bytearray(buffer.getvalue())
    matrix = data.index(b"tkhd") + 44
    data[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    frame = video.decode(bytes(data)).frames[0]
    assert frame.shape == (64, 48, 3)
    assert frame[:, 36:].mean() > 200 > 50 > frame[:, :12].mean()


def test_video_reads_matroska(video: Video) -> None:
    """A container whose header has no number of frames."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for number in range(16):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), number * 10, np.uint8), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 8)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    assert len(video.decode(buffer.getvalue()).frames) == 8


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "film must have bytes, got an empty file"),
        (film_bytes(picture=False, sound=tone(1.0)), "film must have a video stream, got audio"),
        (
            b"These are words.",
            "film must be MP4, MOV, WebM, Matroska, AVI or MPEG, whole, got: "
            "Invalid data found when processing input",
        ),
        (
            film_bytes(40)[:-1500],
            "film must be MP4, MOV, WebM, Matroska, AVI or MPEG, whole, got: "
            "Invalid data found when processing input",
        ),
    ],
)
def test_video_says_why_it_cannot_read(video: Video, data: bytes, message: str) -> None:
    """Empty, foreign and cut files, and sound without a picture, are named as such."""
    with pytest.raises(CorruptMediaError) as caught:
        video.decode(data)
    assert str(caught.value) == message


def _fast_start(path: Path, num_frames: int) -> bytes:
    """An MP4 whose index comes first, so that a cut leaves a readable header."""
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        noise = np.random.default_rng(0)
        for _ in range(num_frames):
            picture = noise.integers(0, 256, (64, 64, 3), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return path.read_bytes()


def test_video_refuses_a_film_that_breaks_off(video: Video, tmp_path: Path) -> None:
    """The frames before the cut are not passed off as the film."""
    data = _fast_start(tmp_path / "film.mp4", 32)
    assert len(video.decode(data).frames) == 16
    with pytest.raises(CorruptMediaError, match="film must be"):
        video.decode(data[: len(data) * 2 // 3])


@pytest.mark.parametrize(
    "data", [picture_bytes(), sound_bytes(tone()), b"#EXTM3U\n#EXTINF:1,\n/etc/hostname\n"]
)
def test_video_refuses_other_media_and_play_lists(video: Video, data: bytes) -> None:
    """Formats outside the list are not even opened."""
    with pytest.raises(CorruptMediaError, match=r"^film must be MP4, MOV, WebM"):
        video.decode(data)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (MediaLimits(max_pixels=1000), "picture must have at most 1000 pixels, got 3072 (64x48); "),
        (MediaLimits(max_frames=7), "film must have at most 7 frames, got 8; "),
        (MediaLimits(max_seconds=1.5), "clip must last at most 1.5 s, got 2.0 s; "),
    ],
)
def test_video_refuses_what_costs_too_much(limits: MediaLimits, message: str) -> None:
    """Pixels, frames and seconds are bounded before a frame is decoded."""
    with pytest.raises(MediaLimitError) as caught:
        Video(PROFILE, limits).decode(film_bytes())
    assert str(caught.value).startswith(message)


def test_video_turns_any_damage_into_its_own_error(video: Video) -> None:
    """Changed bytes end as a MediaError or as a film, never as anything else."""
    whole, rng = film_bytes(8), np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), 6):
            damaged[place] = rng.integers(256)
        try:
            video.encode(video.decode(bytes(damaged)))
        except MediaError:
            continue
