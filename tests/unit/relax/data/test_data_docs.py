"""The examples of docs/data.md, run as printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from relax.config import load_config
from relax.data.config import SourceConfig
from relax.data.manifest import Manifest, Record
from tests.kit.media import picture_bytes

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "data.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_python_examples_run_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another where there is a picture; they assert what they promise."""
    monkeypatch.chdir(tmp_path)
    Path("a.png").write_bytes(picture_bytes())
    blocks = _blocks("python")
    for block in blocks:
        exec(block.replace('open("a.png", "rb").read()', 'Path("a.png").read_bytes()'), {"Path": Path})
    assert len(blocks) == 2


def test_rows_of_every_layout_are_records(tmp_path: Path) -> None:
    """The JSON blocks, in the order of the layouts."""
    (tmp_path / "a.png").write_bytes(picture_bytes())
    for layout, block in zip(("messages", "sharegpt", "columns"), _blocks("json"), strict=True):
        path = tmp_path / f"{layout}.jsonl"
        path.write_text(block)
        for record in Manifest(SourceConfig(path=str(path), layout=layout)):
            assert isinstance(record, Record), record
            assert (record.answer, record.media[0].source) == ("red", "a.png")


def test_configuration_examples_are_read(tmp_path: Path) -> None:
    """The YAML block and the words of the command line."""
    (tmp_path / "run.yaml").write_text(_blocks("yaml")[0])
    data = load_config([tmp_path / "run.yaml"]).data
    assert {name: each.weight for name, each in data.train_sources().items()} == {"pictures": 3, "talks": 1}
    assert data.eval["pictures"].layout == "columns"
    assert data.eval["talks"] == SourceConfig(path="talks_held_out.jsonl")
    command = shlex.split(_blocks("sh")[0].replace("\\\n", " "))
    words = [word for word in command if word.startswith("data.")]
    data = load_config([], words).data
    fields = yaml.safe_load("{prompt: question, answer: solution, images: picture}")
    assert data.train_sources()["train"] == SourceConfig(
        path="train.parquet", layout="columns", fields=fields
    )
