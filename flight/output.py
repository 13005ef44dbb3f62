"""What a server or a service prints, on a disk that may be full: a line that cannot be written is dropped and counted.

Its log is the last thing that a program should end for. It is not a log; see structlog for that.
"""

from __future__ import annotations

import sys
from typing import Any, TextIO


class LastingOutput:
    """A text stream whose writes never raise `OSError`; all else is the stream's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.num_lost = 0
        """Writes that failed."""

    def write(self, text: str) -> int:
        """Write, or drop what cannot be written; return the number of characters."""
        try:
            return self._stream.write(text)
        except OSError:
            self.num_lost += 1
            return len(text)

    def flush(self) -> None:
        """Flush, if that is possible."""
        try:
            self._stream.flush()
        except OSError:
            self.num_lost += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keep_printing() -> None:
    """Let nothing that this process prints end it. For the start of a program. Idempotent."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, LastingOutput):
            setattr(sys, name, LastingOutput(stream))
