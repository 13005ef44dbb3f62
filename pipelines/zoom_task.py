"""A picture with small signs, and an environment in which an agent can look closer: the task of `agent_zoom`.

Each quadrant of a picture has a sign in its middle, and one quadrant is lighter than the others. The answer is the
colour of the sign in that one. A sign is a square with rims that cancel it out when the picture is made smaller: what
is left of it in the picture that the tiny model sees is its quadrant's grey, to less than the rounding of a pixel. Who
does not look closer can only guess, one in four.

    zoom 1 | zoom 2     What the agent can say instead of a colour. It then sees the middle of that quadrant.
    -------+-------
    zoom 3 | zoom 4
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from relax.agents.environment import Medium, Observation, Step, Task

VERSION = 1
"""Raised when the same seed would give other pictures."""
PICTURE_PX = 256
SIGN_PX = 8
RIMS = ((12, -1.467), (16, 0.543), (24, -0.027))
"""Edge of each rim and its share of the sign's colour: by least squares, so that Pillow's bicubic filter leaves less
than 0.3 % of the colour in any pixel of 32 x 32."""
CUT_PX = 12
"""Edge of what a zoom cuts out."""
SHOWN_PX = 64
"""Edge of the picture that a zoom returns."""
GREYS = {"lighter": (160, 190), "others": (70, 100)}
NOISE = 5
COLOURS = {"red": (40, -40, -40), "green": (-40, 40, -40), "blue": (-40, -40, 40), "yellow": (40, 40, -40)}
"""What a sign adds to its quadrant's grey."""
QUESTION = "What colour is the sign?"
ZOOMS = ("zoom 1", "zoom 2", "zoom 3", "zoom 4")
TOOL = "zoom"
STAMP = "zoom.json"


@dataclass(frozen=True, kw_only=True)
class ZoomSpec:
    """How many pictures."""

    num_train: int = 512
    num_eval: int = 64
    seed: int = 0


class Zoom:
    """The environment: `zoom N` shows the middle of a quadrant, anything else is the answer.

    Args:
        max_zooms: Zooms that are answered; another one ends the episode.
    """

    def __init__(self, max_zooms: int = 2) -> None:
        self._max_zooms = max_zooms
        self._num_zooms = 0
        self._task: Task | None = None
        self._picture: Image.Image | None = None

    def reset(self, task: Task) -> Observation:
        """Open the task's picture."""
        if len(task.media) != 1:
            raise ValueError(
                f"zoom: a task must have one picture, got {len(task.media)}; set media.keep=bytes"
            )
        self._task = task
        self._picture = Image.open(io.BytesIO(task.media[0].data)).convert("RGB")
        return Observation()

    def step(self, action_text: str) -> Step:
        """Show a quadrant, or compare the answer."""
        if self._task is None or self._picture is None:
            raise ValueError("zoom: reset must come before step")
        said = action_text.strip()
        if said in ZOOMS and self._num_zooms < self._max_zooms:
            self._num_zooms += 1
            shown = look_closer(self._picture, ZOOMS.index(said))
            return Step(observation=Observation(media=(Medium("image", shown),)), info=self._info)
        right = said == self._task.reference_answer
        return Step(reward=float(right), done=True, info=self._info)

    @property
    def _info(self) -> dict[str, float]:
        return {"num_zooms": float(self._num_zooms)}


def look_closer(picture: Image.Image, quadrant: int) -> bytes:
    """Return the middle of a quadrant as a PNG file."""
    shown = picture.crop(_around(quadrant, CUT_PX))
    return _png(shown.resize((SHOWN_PX, SHOWN_PX), Image.Resampling.NEAREST))


def draw(answer: str, rng: np.random.Generator) -> Image.Image:
    """Return a picture whose sign in the lighter quadrant has the colour `answer`."""
    lighter = int(rng.integers(4))
    half = PICTURE_PX // 2
    pixels = np.zeros((PICTURE_PX, PICTURE_PX, 3))
    for quadrant in range(4):
        row, column = divmod(quadrant, 2)
        grey = rng.integers(*GREYS["lighter" if quadrant == lighter else "others"])
        pixels[row * half : (row + 1) * half, column * half : (column + 1) * half] = grey
        colour = np.array(COLOURS[answer if quadrant == lighter else str(rng.choice(list(COLOURS)))])
        pixels += colour * _sign(quadrant)[..., None]
    # Noise in squares as large as the pixels that the tiny model sees.
    coarse = rng.integers(-NOISE, NOISE + 1, (PICTURE_PX // 8, PICTURE_PX // 8, 3))
    pixels += coarse.repeat(8, 0).repeat(8, 1)
    return Image.fromarray(np.rint(pixels).clip(0, 255).astype(np.uint8))


def _sign(quadrant: int) -> np.ndarray:
    """Return the share of a sign's colour that each pixel has."""
    shares = np.zeros((PICTURE_PX, PICTURE_PX))
    for edge_px, share in (*reversed(RIMS), (SIGN_PX, 1.0)):
        left, top, right, bottom = _around(quadrant, edge_px)
        shares[top:bottom, left:right] = share
    return shares


def _around(quadrant: int, edge_px: int) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of a square around the middle of a quadrant."""
    row, column = divmod(quadrant, 2)
    half = PICTURE_PX // 2
    left, top = (place * half + half // 2 - edge_px // 2 for place in (column, row))
    return left, top, left + edge_px, top + edge_px


def make_zoom_data(directory: Path, spec: ZoomSpec | None = None) -> tuple[Path, Path]:
    """Make pictures and two manifests unless `directory` has them; return the manifests.

    Raises:
        FileExistsError: `directory` has something else in it.
    """
    chosen = spec or ZoomSpec()
    stamp = json.dumps({"version": VERSION, "constants": _constants(), **asdict(chosen)})
    found = directory / STAMP
    if directory.exists() and not found.is_file():
        raise FileExistsError(f"{directory}: must be absent or pictures of this program, got other files")
    if not found.is_file() or found.read_text() != stamp:
        building = directory.parent / f".{directory.name}.{os.getpid()}.partial"
        building.mkdir(parents=True)
        try:
            for number, (split, count) in enumerate((("train", chosen.num_train), ("eval", chosen.num_eval))):
                _write_split(building, split, count, np.random.default_rng([chosen.seed, number]))
            (building / STAMP).write_text(stamp)
            shutil.rmtree(directory, ignore_errors=True)
            building.rename(directory)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return directory / "train.jsonl", directory / "eval.jsonl"


def _write_split(root: Path, split: str, count: int, rng: np.random.Generator) -> None:
    (root / split).mkdir()
    lines = []
    for item in range(count):
        answer = list(COLOURS)[item % len(COLOURS)]
        path = f"{split}/{item:04d}.png"
        (root / path).write_bytes(_png(draw(answer, rng)))
        content = f"<image>{QUESTION}"
        line = {"messages": [{"role": "user", "content": content}], "images": [path], "answer": answer}
        lines.append(json.dumps(line) + "\n")
    (root / f"{split}.jsonl").write_text("".join(lines))


def _png(picture: Image.Image) -> bytes:
    sink = io.BytesIO()
    picture.save(sink, "PNG")
    return sink.getvalue()


def _constants() -> str:
    named = {name: value for name, value in globals().items() if name.isupper() and name != "STAMP"}
    return hashlib.blake2b(repr(sorted(named.items())).encode(), digest_size=8).hexdigest()
