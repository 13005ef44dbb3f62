"""Media in the page of a report."""

from __future__ import annotations

import pytest

from relax.observe.embedding import MediaEmbedder

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


@pytest.fixture
def folder(tmp_path):
    """A data set with a picture, and a picture that is not of it."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.png").write_bytes(PNG)
    (tmp_path / "other.png").write_bytes(PNG)
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "other.png")
    return tmp_path / "data"


def test_embedder_shows_what_a_row_names(folder):
    """Wherever it lies, in a run that trusts its processes."""
    embedder = MediaEmbedder(folder)
    assert [embedder.embed(each).kind for each in ("mine.png", "../other.png", "link.png")] == ["image"] * 3


@pytest.mark.parametrize("source", ["../other.png", "link.png", "../a.zip!other.png", "s3://bucket/a.png"])
def test_confined_embedder_reads_nothing_beside_its_directory(folder, source):
    """No path, link or address of a row leads out of it."""
    asked: list[str] = []
    embedder = MediaEmbedder(folder, read=lambda name: asked.append(name) or PNG, is_confined=True)
    assert embedder.embed("mine.png").kind == "image"
    assert embedder.embed(source).note.startswith("not readable: the page of a run with keys embeds")
    assert embedder.embed(str(folder.parent / "other.png")).kind == "none"
    assert asked == []
