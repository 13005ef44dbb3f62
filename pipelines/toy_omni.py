"""Makes the toy data set: real PNG, JPEG, WAV, FLAC, MP3 and MP4 files and two manifests. Nothing is trained here.

    python pipelines/toy_omni.py --out data/toy_omni

Three questions with four answers each: the colour of a shape, the pitch of a sound, the direction in which a square
moves. The same seed gives the same files. A directory that has them already is left alone; a new one appears whole
or not at all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image, ImageDraw

VERSION = 2
"""Raised when the same parameters would give other files."""

IMAGE_PX = 64
SHAPE_PX = (24, 40)
"""Edge of the shape: least and most (exclusive)."""
COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 70, 220), "yellow": (225, 210, 40)}
COLOUR_JITTER = 25
IMAGE_NOISE = 8
IMAGE_FORMATS = ("png", "jpg")

SOUND_S = 0.5
SOUND_RATE_HZ = 16_000
PITCHES_HZ = {"low": (140, 240), "middle": (400, 650), "high": (1000, 1600), "top": (2500, 4000)}
OVERTONES = (1.0, 0.25, 0.1)
LOUDNESS = (0.15, 0.5)
SOUND_NOISE = 0.02
SOUND_FORMATS = ("wav", "flac", "mp3")

FILM_PX = 64
FILM_FRAMES = 8
FILM_FPS = 4
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
SQUARE_PX = (20, 27)
MARGIN_PX = (4, 11)
"""The square's way is the film's width less its edge less this (least and most, exclusive)."""
FILM_NOISE = 6
SOUND_TRACK_EVERY = 4
"""Each n-th film has a sound track (AAC)."""

PARTS_EVERY = 4
"""Each n-th line has its content as a list of parts instead of text with a placeholder."""

QUESTIONS = {
    "image": (
        "What colour is the shape?",
        "Which colour does the shape have?",
        "Name the colour of the shape.",
    ),
    "audio": ("Which pitch does the sound have?", "How high is the sound?", "Name the pitch of the sound."),
    "video": (
        "Which direction does the square move?",
        "Where does the square move?",
        "Name the direction of the square.",
    ),
}
ANSWERS = {"image": tuple(COLOURS), "audio": tuple(PITCHES_HZ), "video": tuple(DIRECTIONS)}
STAMP = "toy_omni.json"


@dataclass(frozen=True, kw_only=True)
class ToySpec:
    """How much of it. Items are counted for each of the three modalities."""

    num_train: int = 512
    num_eval: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_train", "num_eval"):
            if getattr(self, name) < 1:
                raise ValueError(f"toy_omni: {name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class ToyData:
    """Where the manifests are."""

    train: Path
    eval: Path


def make_toy_omni(directory: str | Path, spec: ToySpec | None = None) -> ToyData:
    """Make the data set unless `directory` holds it already; a set of other parameters is replaced.

    Raises:
        FileExistsError: `directory` has something else in it.
    """
    target, spec = Path(directory), spec or ToySpec()
    data = ToyData(target / "train.jsonl", target / "eval.jsonl")
    stamp = _stamp(spec)
    if _read_stamp(target) == stamp:
        return data
    if target.exists() and _read_stamp(target) is None and any(target.iterdir()):
        raise FileExistsError(
            f"{target}: must be empty or an older toy data set, got other files; name another place"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write_split(building, "train", spec.num_train, spec.seed)
        _write_split(building, "eval", spec.num_eval, spec.seed)
        (building / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
        building.chmod(0o755)
        _move_into_place(building, target, stamp)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return data


def draw_image(path: Path, answer: str, rng: np.random.Generator) -> None:
    """Write a picture of one shape in the colour `answer`."""
    grey = rng.integers(60, 180)
    background = tuple(int(value) for value in grey + rng.integers(-12, 13, 3))
    picture = Image.new("RGB", (IMAGE_PX, IMAGE_PX), background)
    jitter = rng.integers(-COLOUR_JITTER, COLOUR_JITTER + 1, 3)
    colour = tuple(int(value) for value in np.clip(np.array(COLOURS[answer]) + jitter, 0, 255))
    edge = int(rng.integers(*SHAPE_PX))
    left, top = (int(value) for value in rng.integers(2, IMAGE_PX - edge - 2, 2))
    box = (left, top, left + edge, top + edge)
    draw = ImageDraw.Draw(picture)
    shape = int(rng.integers(3))
    if shape == 0:
        draw.rectangle(box, fill=colour)
    elif shape == 1:
        draw.ellipse(box, fill=colour)
    else:
        draw.polygon([(left + edge // 2, top), (left, top + edge), (left + edge, top + edge)], fill=colour)
    noise = rng.integers(-IMAGE_NOISE, IMAGE_NOISE + 1, (IMAGE_PX, IMAGE_PX, 3))
    noisy = np.clip(np.asarray(picture).astype(np.int16) + noise, 0, 255).astype(np.uint8)
    Image.fromarray(noisy).save(path, quality=88)


def play_sound(path: Path, answer: str, rng: np.random.Generator) -> None:
    """Write a tone with overtones in the pitch band `answer`."""
    soundfile.write(path, _tone(PITCHES_HZ[answer], SOUND_S, rng), SOUND_RATE_HZ)


def film_motion(path: Path, answer: str, rng: np.random.Generator, *, with_sound: bool) -> None:
    """Write a film of a square that moves towards `answer`."""
    sound = None
    if with_sound:
        seconds = FILM_FRAMES / FILM_FPS
        sound = _tone(PITCHES_HZ[str(rng.choice(list(PITCHES_HZ)))], seconds, rng)
    frames = _moving_square(DIRECTIONS[answer], rng)
    # One thread and one version of x264 give the same bytes for the same seed.
    options = {"preset": "veryfast", "crf": "20", "tune": "zerolatency", "threads": "1"}
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FILM_FPS, options=options)
        stream.width = stream.height = FILM_PX
        stream.pix_fmt = "yuv420p"
        track = container.add_stream("aac", rate=SOUND_RATE_HZ, layout="mono") if sound is not None else None
        for number, picture in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, FILM_FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if track is not None and sound is not None:
            _mux_sound(container, track, sound)


def _tone(band_hz: tuple[int, int], seconds: float, rng: np.random.Generator) -> np.ndarray:
    low, high = (math.log(value) for value in band_hz)
    pitch_hz = math.exp(rng.uniform(low, high))
    time_s = np.arange(int(seconds * SOUND_RATE_HZ)) / SOUND_RATE_HZ
    wave = np.zeros(len(time_s))
    for number, strength in enumerate(OVERTONES, start=1):
        phase = rng.uniform(0, 2 * math.pi)
        if pitch_hz * number < 0.475 * SOUND_RATE_HZ:
            wave += strength * np.sin(2 * math.pi * pitch_hz * number * time_s + phase)
    wave = wave * rng.uniform(*LOUDNESS) + rng.standard_normal(len(time_s)) * SOUND_NOISE
    fade = np.minimum(1, np.minimum(time_s, time_s[::-1]) * 100)
    return np.clip(wave * fade, -1, 1).astype(np.float32)


def _moving_square(direction: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Return uint8 [FILM_FRAMES, FILM_PX, FILM_PX, 3]."""
    edge = int(rng.integers(*SQUARE_PX))
    motion = FILM_PX - edge - int(rng.integers(*MARGIN_PX))
    start = int(rng.integers(1, FILM_PX - edge - motion))
    across = int(rng.integers(1, FILM_PX - edge - 1))
    colour = rng.integers(170, 256, 3)
    frames = np.full((FILM_FRAMES, FILM_PX, FILM_PX, 3), rng.integers(10, 50), np.int16)
    for number in range(FILM_FRAMES):
        share = number / (FILM_FRAMES - 1)
        along = start + int(motion * (share if sum(direction) > 0 else 1 - share))
        x, y = (along, across) if direction[0] else (across, along)
        frames[number, y : y + edge, x : x + edge] = colour
    frames += rng.integers(-FILM_NOISE, FILM_NOISE + 1, frames.shape, np.int16)
    return np.clip(frames, 0, 255).astype(np.uint8)


def _mux_sound(container: Any, track: Any, sound: np.ndarray) -> None:
    block = 1024  # samples in an AAC frame
    padded = np.pad(sound, (0, -len(sound) % block))
    for start in range(0, len(padded), block):
        frame = av.AudioFrame.from_ndarray(padded[None, start : start + block], format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = SOUND_RATE_HZ, start, Fraction(1, SOUND_RATE_HZ)
        container.mux(track.encode(frame))
    container.mux(track.encode(None))


def _write_split(root: Path, split: str, num_items: int, seed: int) -> None:
    (root / split).mkdir()
    lines: list[dict[str, Any]] = []
    split_number = ("train", "eval").index(split)
    answers = {
        name: _balanced(words, num_items, np.random.default_rng([seed, split_number, 99, number]))
        for number, (name, words) in enumerate(ANSWERS.items())
    }
    for item in range(num_items):
        for number, (name, write) in enumerate(_writers(item).items()):
            rng = np.random.default_rng([seed, split_number, number, item])
            path = Path(split) / f"{name}_{item:04d}.{_suffix(name, item)}"
            write(root / path, answers[name][item], rng)
            question = str(rng.choice(QUESTIONS[name]))
            lines.append(
                _line(name, path.as_posix(), question, answers[name][item], as_parts=not item % PARTS_EVERY)
            )
    with open(root / f"{split}.jsonl", "w", encoding="utf-8") as manifest:
        manifest.writelines(json.dumps(line) + "\n" for line in lines)


def _writers(item: int) -> dict[str, Callable[[Path, str, np.random.Generator], None]]:
    with_sound = not item % SOUND_TRACK_EVERY

    def write_film(path: Path, answer: str, rng: np.random.Generator) -> None:
        film_motion(path, answer, rng, with_sound=with_sound)

    return {"image": draw_image, "audio": play_sound, "video": write_film}


def _suffix(name: str, item: int) -> str:
    choices = {"image": IMAGE_FORMATS, "audio": SOUND_FORMATS, "video": ("mp4",)}[name]
    return choices[item % len(choices)]


def _balanced(words: Sequence[str], num_items: int, rng: np.random.Generator) -> list[str]:
    """Return each word equally often, in random order."""
    repeated = [words[number % len(words)] for number in range(num_items)]
    return [repeated[number] for number in rng.permutation(num_items)]


def _line(name: str, path: str, question: str, answer: str, *, as_parts: bool) -> dict[str, Any]:
    if as_parts:
        parts = [{"type": name, name: path}, {"type": "text", "text": question}]
        return {"messages": [{"role": "user", "content": parts}], "answer": answer}
    content = f"<{name}>{question}"
    return {"messages": [{"role": "user", "content": content}], f"{name}s": [path], "answer": answer}


def _stamp(spec: ToySpec) -> dict[str, Any]:
    """Return what decides the files: the version, the amounts and every constant of this module."""
    constants = {name: value for name, value in globals().items() if name.isupper() and name != "STAMP"}
    digest = hashlib.blake2b(repr(sorted(constants.items())).encode(), digest_size=8).hexdigest()
    return {"version": VERSION, "constants": digest, **asdict(spec)}


def _read_stamp(directory: Path) -> dict[str, Any] | None:
    try:
        stamp = json.loads((directory / STAMP).read_text())
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def _move_into_place(building: Path, target: Path, stamp: dict[str, Any]) -> None:
    """Rename `building` to `target`; a set that stands there is moved aside first and deleted last."""
    aside = building.with_name(building.name + "-old")
    try:
        if target.exists():
            os.rename(target, aside)
        os.rename(building, target)
    except OSError:
        # Another process may have been faster; its files are the same.
        if _read_stamp(target) != stamp:
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the data set from the command line."""
    parser = argparse.ArgumentParser(description="Make the toy data set of real media files.")
    parser.add_argument(
        "--out", type=Path, default=Path("data/toy_omni"), help="directory (default: %(default)s)"
    )
    parser.add_argument("--num-train", type=int, default=ToySpec.num_train, help="training items a modality")
    parser.add_argument("--num-eval", type=int, default=ToySpec.num_eval, help="held-out items a modality")
    parser.add_argument("--seed", type=int, default=ToySpec.seed)
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        spec = ToySpec(num_train=options.num_train, num_eval=options.num_eval, seed=options.seed)
        data = make_toy_omni(options.out, spec)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{data.train} and {data.eval} ({time.monotonic() - started:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
