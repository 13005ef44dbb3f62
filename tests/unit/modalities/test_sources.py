"""Where bytes come from."""

from __future__ import annotations

import base64
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from modalities.base import MediaLimits
from modalities.errors import MediaLimitError, SourceError
from modalities.sources import find_missing, read_bytes

DATA = b"abc" * 100
SMALL = MediaLimits(max_bytes=299)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with the same bytes as a file, in a zip and in two tars."""
    (tmp_path / "file.bin").write_bytes(DATA)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("in/file.bin", DATA)
    for name, mode in (("a.tar", "w"), ("a.tar.gz", "w:gz")):
        with tarfile.open(tmp_path / name, mode) as tape:
            entry = tarfile.TarInfo("in/file.bin")
            entry.size = len(DATA)
            tape.addfile(entry, io.BytesIO(DATA))
    return tmp_path


SOURCES = (
    "file.bin",
    "a.zip!in/file.bin",
    "a.tar!in/file.bin",
    "a.tar.gz!in/file.bin",
    "data:image/png;base64," + base64.b64encode(DATA).decode(),
    "data:text/plain," + DATA.decode(),
)


@pytest.mark.parametrize("source", SOURCES)
def test_sources_of_every_kind_give_the_same_bytes(folder: Path, source: str) -> None:
    """Relative paths count from the base directory."""
    assert read_bytes(source, base_dir=folder, limits=MediaLimits()) == DATA
    assert find_missing(source, base_dir=folder) is None


@pytest.mark.parametrize("source", SOURCES)
def test_sources_that_are_too_large_are_refused(folder: Path, source: str) -> None:
    """The same limit for every kind."""
    with pytest.raises(MediaLimitError, match=r"^file must have at most 299 bytes, got 300; "):
        read_bytes(source, base_dir=folder, limits=SMALL)


def test_sources_read_urls_through_fsspec(folder: Path) -> None:
    """A URL that fsspec knows; files are the one kind that needs no network."""
    pytest.importorskip("fsspec")
    assert read_bytes(f"file://{folder}/file.bin", base_dir="/", limits=MediaLimits()) == DATA
    with pytest.raises(MediaLimitError):
        read_bytes(f"file://{folder}/file.bin", base_dir="/", limits=SMALL)
    with pytest.raises(SourceError, match=r"^nowhere://x: URL must be readable, got "):
        read_bytes("nowhere://x", base_dir="/", limits=MediaLimits())


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("gone.bin", "file must be readable, got No such file or directory"),
        (".", "file must be readable, got Is a directory"),
        ("pipe", "file must be a regular file, got a pipe or device"),
        ("bad\0name", "file must be readable, got embedded null byte"),
        (
            "a.zip!gone",
            "archive member must be readable, got \"There is no item named 'gone' in the archive\"",
        ),
        ("a.tar!gone", "archive member must be readable, got \"filename 'gone' not found\""),
        ("file.bin.zip!x", "archive member must be readable, got [Errno 2] No such file or directory: "),
        ("data:image/png;base64", "data URI must have a comma before its data, got none"),
        ("data:image/png;base64,a$b", "data URI must be base64, got Only base64 data is allowed"),
    ],
)
def test_sources_say_why_there_is_nothing_to_read(folder: Path, source: str, reason: str) -> None:
    """Missing files and members, directories, pipes (without waiting) and broken data URIs."""
    os.mkfifo(folder / "pipe")
    with pytest.raises(SourceError) as caught:
        read_bytes(source, base_dir=folder, limits=MediaLimits())
    assert caught.value.reason.startswith(reason)
    assert caught.value.place


def test_sources_refuse_a_broken_archive(folder: Path) -> None:
    """A text file named .zip is no archive."""
    (folder / "b.zip").write_text("words")
    with pytest.raises(SourceError) as caught:
        read_bytes("b.zip!x", base_dir=folder, limits=MediaLimits())
    assert str(caught.value) == f"{folder}/b.zip!x: archive must be whole, got File is not a zip file"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("", "path must not be empty, got ''"),
        ("gone.bin", "path must be a file, got gone.bin: No such file or directory"),
        ("gone.zip!x", "path must be a file, got gone.zip!x: No such file or directory"),
        (".", "path must be a regular file, got ."),
        ("bad\0name", "path must be a file, got bad\0name: embedded null byte"),
    ],
)
def test_sources_find_what_is_missing_without_opening_it(folder: Path, source: str, problem: str) -> None:
    """The manifest asks this for each path."""
    assert find_missing(source, base_dir=folder) == problem
