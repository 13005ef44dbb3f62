"""Pictures, sounds and films as data URIs for a page that must work alone. It decodes nothing and fetches nothing.

What a file is, is told by its first bytes, never by its name; other files than media are not embedded. A file that
cannot be embedded becomes a note that says why.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["image", "audio", "video", "none"]


@dataclass(frozen=True, kw_only=True)
class EmbeddingLimits:
    """How much media a page may hold, in bytes of the files (a data URI is a third larger)."""

    max_file_bytes: int = 4 << 20
    max_total_bytes: int = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """One media item of the page: `uri` is a data URI, or empty with the reason in `note`."""

    source: str
    kind: Kind
    uri: str = ""
    note: str = ""


class MediaEmbedder:
    """Turns media sources into data URIs until the page is full.

    Args:
        base_dir: where relative paths count from.
        read: returns the bytes of a source that is no plain file, such as a member of an archive; raises OSError or
            ValueError when it cannot. Absent: such sources are not embedded.
        is_confined: whether files below `base_dir` alone are read, because the sources come from others.
    """

    def __init__(
        self,
        base_dir: Path,
        limits: EmbeddingLimits | None = None,
        read: Callable[[str], bytes] | None = None,
        *,
        is_confined: bool = False,
    ) -> None:
        self._base_dir = base_dir
        self._is_confined = is_confined
        self._limits = limits or EmbeddingLimits()
        self._read = read
        self._num_bytes = 0

    def embed(self, source: str) -> Embedded:
        """Return the source as a data URI, or a note that says why not; never raises for what a source holds."""
        shown = source if len(source) <= 160 else source[:157] + "…"
        try:
            data = self._bytes_of(source)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            return Embedded(source=shown, kind="none", note=f"not readable: {reason}")
        mime = sniff(data)
        if mime is None:
            return Embedded(
                source=shown, kind="none", note="not embedded: no picture, sound or film of a known kind"
            )
        if self._num_bytes + len(data) > self._limits.max_total_bytes:
            limit = self._limits.max_total_bytes
            return Embedded(
                source=shown, kind="none", note=f"not embedded: the page holds its {limit:,} bytes of media"
            )
        self._num_bytes += len(data)
        kind = mime.partition("/")[0]
        uri = f"data:{mime};base64,{base64.b64encode(data).decode()}"
        return Embedded(source=shown, kind=kind, uri=uri)  # type: ignore[arg-type]  # the kinds that sniff knows

    def _bytes_of(self, source: str) -> bytes:
        if source.startswith("data:"):
            return self._checked(_data_uri_bytes(source))
        path = self._base_dir / source
        if self._is_confined and (
            "://" in source or not path.resolve().is_relative_to(self._base_dir.resolve())
        ):
            raise ValueError("the page of a run with keys embeds files below the manifest's directory only")
        if "://" not in source and path.is_file():
            self._check(path.stat().st_size)
            return path.read_bytes()
        if self._read is not None:
            return self._checked(self._read(source))
        if "://" in source:
            raise ValueError("the page embeds local files only")
        raise FileNotFoundError(2, os.strerror(2))

    def _checked(self, data: bytes) -> bytes:
        self._check(len(data))
        return data

    def _check(self, num_bytes: int) -> None:
        limit = self._limits.max_file_bytes
        if num_bytes > limit:
            raise ValueError(f"file must be at most {limit:,} bytes to be embedded, got {num_bytes:,}")


def _data_uri_bytes(source: str) -> bytes:
    head, _, payload = source.partition(",")
    if not head.endswith(";base64"):
        raise ValueError("data URI must be base64")
    try:
        return base64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise ValueError(f"data URI must be base64: {error}") from error


def sniff(data: bytes) -> str | None:
    """Return the media type that the first bytes tell, None for anything that a page cannot show."""
    for mime, offset, magic in _MAGIC:
        if data[offset : offset + len(magic)] == magic:
            return mime
    if data[:4] == b"RIFF":
        return {b"WAVE": "audio/wav", b"WEBP": "image/webp"}.get(data[8:12])
    if data[4:8] == b"ftyp":
        return {b"M4A ": "audio/mp4", b"avif": "image/avif"}.get(data[8:12], "video/mp4")
    if len(data) > 2 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2:
        return "audio/mpeg"
    return None


_MAGIC = (
    ("image/png", 0, b"\x89PNG\r\n\x1a\n"),
    ("image/jpeg", 0, b"\xff\xd8\xff"),
    ("image/gif", 0, b"GIF8"),
    ("audio/flac", 0, b"fLaC"),
    ("audio/ogg", 0, b"OggS"),
    ("audio/mpeg", 0, b"ID3"),
    ("video/webm", 0, b"\x1aE\xdf\xa3"),
)
