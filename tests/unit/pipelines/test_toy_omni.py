"""The toy data set: real files, the same for the same seed, whole or not at all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from modalities.base import EncodingProfile, MediaLimits
from modalities.registry import load_modalities
from modalities.sources import read_bytes
from pipelines.toy_omni import ANSWERS, ToySpec, main, make_toy_omni
from relax.data.manifest import Manifest, Record

SMALL = ToySpec(num_train=12, num_eval=4)


def _contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def test_toy_omni_makes_files_that_every_modality_reads(tmp_path: Path) -> None:
    """Each line is a good record, each file decodes, each answer appears equally often."""
    data = make_toy_omni(tmp_path / "toy", SMALL)
    modalities = load_modalities(EncodingProfile(), MediaLimits())
    answers: dict[str, Counter[str]] = {name: Counter() for name in ANSWERS}
    suffixes = set()
    for record in Manifest(data.train):
        assert isinstance(record, Record)
        (ref,) = record.media
        modality = modalities[ref.modality]
        source = read_bytes(ref.source, base_dir=record.base_dir, limits=modality.limits)
        modality.decode(source)
        answers[record.modality][record.answer] += 1
        suffixes.add(Path(ref.source).suffix)
    assert answers == {name: Counter(dict.fromkeys(words, 3)) for name, words in ANSWERS.items()}
    assert suffixes == {".png", ".jpg", ".wav", ".flac", ".mp3", ".mp4"}
    assert len(Manifest(data.eval)) == 12


def test_toy_omni_gives_some_films_a_sound_track(tmp_path: Path) -> None:
    """Every fourth film can be heard."""
    make_toy_omni(tmp_path / "toy", SMALL)
    audio = load_modalities(EncodingProfile(), MediaLimits())["audio"]
    assert len(audio.decode((tmp_path / "toy/train/video_0004.mp4").read_bytes())) > 30_000


def test_toy_omni_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    """Byte for byte; another seed gives other files."""
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_toy_omni(tmp_path / name, ToySpec(num_train=4, num_eval=2, seed=seed))
    first, second, third = (_contents(tmp_path / name) for name in "abc")
    assert first == second
    assert first["train/image_0000.png"] != third["train/image_0000.png"]


def test_toy_omni_is_made_once_and_replaced_when_its_parameters_change(tmp_path: Path) -> None:
    """The second call touches nothing; other amounts replace the set and leave nothing behind."""
    target = tmp_path / "toy"
    make_toy_omni(target, SMALL)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    make_toy_omni(target, SMALL)
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == before
    make_toy_omni(target, ToySpec(num_train=4, num_eval=4))
    assert len(Manifest(target / "train.jsonl")) == 12
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_toy_omni_leaves_directories_of_others_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory with other files is refused and not changed."""
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path}: must be empty or an older toy data set, got other files; name another place\n"
    )
    assert _contents(tmp_path) == {"thesis.txt": b"years of work"}
