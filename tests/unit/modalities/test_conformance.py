"""The conformance kit: ours and the example pass, broken ones are told what is wrong."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image as PilImage

from modalities.audio import Audio
from modalities.base import Encoded, Modality
from modalities.conformance import check_modality, find_problems, main
from modalities.errors import ModalityError
from modalities.image import Image
from modalities.registry import load_class
from modalities.video import Video
from tests.kit.media import PROFILE, film_bytes, picture_bytes, sound_bytes, tone, write_model_dir

EXAMPLE = Path(__file__).parents[3] / "examples" / "depth_modality"


def _depth_png() -> bytes:
    buffer = io.BytesIO()
    PilImage.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30)).save(buffer, "PNG")
    return buffer.getvalue()


SAMPLES: dict[type[Modality], list[bytes]] = {
    Image: [picture_bytes(), picture_bytes(80, 20, "JPEG")],
    Audio: [sound_bytes(tone()), sound_bytes(tone(2.0, 44_100), 44_100, "FLAC"), film_bytes(sound=tone(1.0))],
    Video: [film_bytes(), film_bytes(30, fps=10, width=100)],
}


@pytest.mark.parametrize("modality_class", SAMPLES)
def test_conformance_of_ours(modality_class: type[Modality]) -> None:
    """Image, audio and video keep their promises."""
    check_modality(modality_class, SAMPLES[modality_class], profile=PROFILE)


def test_conformance_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example that README and docs show keeps them too."""
    monkeypatch.syspath_prepend(EXAMPLE)
    check_modality(load_class("depth_modality.depth:Depth"), [_depth_png()])


class _Forgetful(Image):
    """Loses the rows that have no picture."""

    def to_arrow(self, rows: Sequence[Sequence[Encoded]]) -> dict[str, pa.Array]:
        return super().to_arrow([row or [self.encode(np.zeros((8, 8, 3), np.uint8))] for row in rows])


class _Generous(Image):
    """Asks for one token too many."""

    def num_tokens(self, encoded: Encoded) -> int:
        return super().num_tokens(encoded) + 1


class _Floating(Image):
    """Normalises, which is the trainer's job."""

    def encode(self, array: np.ndarray) -> Encoded:
        encoded = super().encode(array)
        return encoded | {"patches": encoded["patches"] / np.float32(255)}


class _Careless(Image):
    """Reads anything."""

    def decode(self, data: bytes) -> np.ndarray:
        return np.zeros((8, 8, 3), np.uint8)


class _Anonymous(Image):
    """Hides which numbers it was made with."""

    def identity(self) -> str:
        return "anonymous"


class _Moody(Image):
    """Is somebody else each time."""

    def identity(self) -> str:
        return f"{super().identity()} {id(self)}"


@pytest.mark.parametrize(
    ("modality_class", "problem"),
    [
        (
            _Anonymous,
            "identity must tell apart encoders that make different arrays, got the same for two profiles",
        ),
        (_Forgetful, "to_arrow must make image_patches null where a row is empty, and only there"),
        (_Generous, "sample 0: num_tokens must be the tower's 4, got 5"),
        (_Floating, "sample 0: patches must be <class 'numpy.uint8'> ['n', 384], got float32 [16, 384]"),
        (_Careless, "decode must raise a MediaError for an empty file, got no error"),
    ],
)
def test_conformance_names_the_broken_promise(modality_class: type[Modality], problem: str) -> None:
    """Each problem is one line; check_modality raises them all together."""
    assert problem in find_problems(modality_class, SAMPLES[Image], profile=PROFILE)
    with pytest.raises(ModalityError, match=r"must"):
        check_modality(modality_class, SAMPLES[Image], profile=PROFILE)


def test_conformance_wants_the_same_identity_for_the_same_numbers() -> None:
    """Two services must agree on the ids of media."""
    (problem,) = find_problems(_Moody, SAMPLES[Image], profile=PROFILE)
    assert problem.startswith("identity must be the same for the same profile, got ")


def test_conformance_runs_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Class, files, and the model directory whose numbers count."""
    sample = tmp_path / "sample.png"
    sample.write_bytes(picture_bytes())
    model_dir = write_model_dir(tmp_path / "model")
    assert main(["modalities.image:Image", str(sample), "--model-dir", str(model_dir)]) == 0
    assert capsys.readouterr().out == "modalities.image:Image: keeps its promises (1 samples)\n"
    assert main(["modalities.image:Nothing", str(sample)]) == 2
    assert main(["modalities.audio:Audio", str(sample)]) == 1
