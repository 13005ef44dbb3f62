"""Errors of the media stages: one tree. Every failure that a file can cause is one of these.

MediaError
├── SourceError        (OSError)     the bytes cannot be had: no such file, no such archive member, bad data URI
├── MediaLimitError    (ValueError)  the file costs more bytes, pixels, frames or seconds than is allowed
├── CorruptMediaError  (ValueError)  the bytes are not what the modality reads, or are damaged
├── DamagedMediaError  (ValueError)  stored media are not what was stored under their id
└── ModalityError      (TypeError)   a modality itself is wrong: its class, its columns or its arrays
"""

from __future__ import annotations


class MediaError(Exception):
    """Root of the tree: `reason` says what is wrong, `place` whose fault it is ("" when the caller knows it)."""

    code = "media"

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(reason, place)
        self.reason = reason
        self.place = place

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}" if self.place else self.reason

    def at(self, place: str) -> MediaError:
        """Return the same error with `place`; one that has a place already is returned as it is."""
        return self if self.place else type(self)(self.reason, place)


class SourceError(MediaError, OSError):
    code = "media_source"


class MediaLimitError(MediaError, ValueError):
    code = "media_limit"


class CorruptMediaError(MediaError, ValueError):
    code = "media_corrupt"


class DamagedMediaError(MediaError, ValueError):
    code = "media_damaged"


class ModalityError(MediaError, TypeError):
    code = "modality"
