"""Where the bytes of a media file come from, decided in one place. Nothing is decoded here.

A source is one of:
    relative/or/absolute/path.png
    data:image/png;base64,iVBORw0...
    archive.zip!folder/member.png          (also .tar, .tar.gz, .tgz, .tar.bz2, .tar.xz)
    s3://bucket/key.png                    (any URL that fsspec opens, if fsspec is installed)
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import IO
from urllib.parse import unquote_to_bytes

from modalities.base import MediaLimits
from modalities.errors import MediaError, SourceError

_ARCHIVE = re.compile(
    r"^(?P<archive>.+?\.(?:zip|tar|tgz|tar\.gz|tar\.bz2|tar\.xz))!(?P<member>.+)$", re.IGNORECASE
)
_SHOWN_CHARS = 120


def read_bytes(source: str, *, base_dir: str | Path, limits: MediaLimits) -> bytes:
    """Return the bytes that `source` names; relative paths count from `base_dir`.

    Raises:
        SourceError: there is nothing to read, or it cannot be read.
        MediaLimitError: it is larger than `limits.max_bytes`; found without reading it whole.
    """
    if source.startswith("data:"):
        return _read_data_uri(source, limits)
    if "://" in source:
        return _read_url(source, limits)
    if match := _ARCHIVE.match(source):
        return _read_member(resolve(match["archive"], base_dir), match["member"], limits)
    return _read_file(resolve(source, base_dir), limits)


def find_missing(source: str, *, base_dir: str | Path) -> str | None:
    """Return why `source` cannot be there, or None. Looks at local files only; opens nothing."""
    if not source:
        return "path must not be empty, got ''"
    if source.startswith("data:") or "://" in source:
        return None
    match = _ARCHIVE.match(source)
    path = resolve(match["archive"] if match else source, base_dir)
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        return f"path must be a file, got {shown(source)}: {getattr(error, 'strerror', None) or error}"
    return None if stat.S_ISREG(mode) else f"path must be a regular file, got {shown(source)}"


def resolve(path: str, base_dir: str | Path) -> Path:
    """Return `path` as seen from `base_dir`."""
    return Path(base_dir) / path


def shown(source: str) -> str:
    """Return `source` short enough for a message."""
    return source if len(source) <= _SHOWN_CHARS else f"{source[:_SHOWN_CHARS]}... ({len(source)} characters)"


def _read_file(path: Path, limits: MediaLimits) -> bytes:
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SourceError("file must be a regular file, got a pipe or device", shown(str(path)))
            limits.check_bytes(status.st_size)
            return _read_limited(file, limits)
    except (OSError, ValueError) as error:
        if isinstance(error, MediaError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise SourceError(f"file must be readable, got {reason}", shown(str(path))) from error


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a named pipe too without waiting for its writer, so that it can be refused."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read_limited(file: IO[bytes], limits: MediaLimits) -> bytes:
    data = file.read(limits.max_bytes + 1)
    limits.check_bytes(len(data))
    return data


def _read_data_uri(source: str, limits: MediaLimits) -> bytes:
    header, comma, payload = source.partition(",")
    if not comma:
        raise SourceError("data URI must have a comma before its data, got none", shown(source))
    if not header.endswith(";base64"):
        limits.check_bytes(len(payload) // 3)
        data = unquote_to_bytes(payload)
    else:
        limits.check_bytes(len(payload) * 3 // 4 - 2)
        try:
            data = base64.b64decode(payload, validate=True)
        except (binascii.Error, ValueError) as error:
            raise SourceError(f"data URI must be base64, got {error}", shown(source)) from error
    limits.check_bytes(len(data))
    return data


def _read_member(archive: Path, member: str, limits: MediaLimits) -> bytes:
    place = shown(f"{archive}!{member}")
    damage = (OSError, EOFError, KeyError, RuntimeError, NotImplementedError, ValueError, zlib.error)
    try:
        if archive.suffix.lower() == ".zip":
            with zipfile.ZipFile(archive) as opened, opened.open(member) as file:
                limits.check_bytes(opened.getinfo(member).file_size)
                return _read_limited(file, limits)
        with tarfile.open(archive) as tape:
            entry = tape.getmember(member)
            limits.check_bytes(entry.size)
            stream = tape.extractfile(entry) if entry.isfile() else None
            if stream is None:
                raise SourceError("archive member must be a regular file, got something else", place)
            return _read_limited(stream, limits)
    except (zipfile.BadZipFile, tarfile.TarError) as error:
        raise SourceError(f"archive must be whole, got {error}", place) from error
    except damage as error:
        if isinstance(error, MediaError):
            raise
        raise SourceError(f"archive member must be readable, got {error}", place) from error


def _read_url(source: str, limits: MediaLimits) -> bytes:
    try:
        import fsspec  # an extra of the user's: only URLs need it
    except ImportError as error:
        raise SourceError(
            "URL must be read by fsspec, got no such package; pip install fsspec", shown(source)
        ) from error
    try:
        with fsspec.open(source, "rb") as file:
            return _read_limited(file, limits)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        if isinstance(error, MediaError):
            raise
        raise SourceError(f"URL must be readable, got {error}", shown(source)) from error
