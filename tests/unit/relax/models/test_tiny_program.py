"""`pipelines/tiny_omni.py`: made once, remade when its questions change, never over other files."""

from __future__ import annotations

import json

import pytest

from pipelines.tiny_omni import make
from relax.data.config import SourceConfig
from relax.data.errors import ManifestError
from relax.errors import WiringError
from relax.models.warm_up import WarmUpConfig

QUICK = WarmUpConfig(num_steps=2, questions_per_step=4)


def _manifest(directory, answers):
    path = directory / f"{'-'.join(answers)}.jsonl"
    lines = [{"messages": [{"role": "user", "content": "Which?"}], "answer": answer} for answer in answers]
    path.write_text("\n".join([*map(json.dumps, lines), "not JSON"]))
    return [SourceConfig(path=str(path))]


def test_tiny_program_makes_a_model_once(tmp_path):
    """The second call finds it; another manifest remakes it; no partial directory stays."""
    out = tmp_path / "models" / "tiny"
    colours = _manifest(tmp_path, ["red", "blue"])
    first = make(out, colours, 0, QUICK)
    assert first.startswith(f"tiny model: {out} made from seed 0 in ")
    assert "1 questions, well-formed answers " in first
    assert make(out, colours, 0, QUICK) == f"tiny model: {out} is there already"
    assert "made from seed 0" in make(out, _manifest(tmp_path, ["up", "down"]), 0, QUICK)
    assert [path.name for path in out.parent.iterdir()] == ["tiny"]
    assert (out / "model.safetensors").exists()


def test_tiny_program_leaves_other_files_alone(tmp_path):
    """A directory that is not its own is refused, and so is a missing manifest."""
    out = tmp_path / "mine"
    out.mkdir()
    (out / "notes.txt").write_text("keep")
    with pytest.raises(WiringError, match=r"must be absent or a model that this program made"):
        make(out, _manifest(tmp_path, ["red", "blue"]), 0, QUICK)
    assert (out / "notes.txt").read_text() == "keep"
    with pytest.raises(ManifestError):
        make(tmp_path / "new", [SourceConfig(path=str(tmp_path / "missing.jsonl"))], 0, QUICK)
    assert not (tmp_path / "new").exists()
