"""The end of a log file and the error in it. It reads files that services wrote; it writes none."""

from __future__ import annotations

import os
import re
from pathlib import Path

TAIL_BYTES = 64 * 1024

_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|^Fatal Python error:")


def read_tail(path: Path, *, start: int = 0, max_bytes: int = TAIL_BYTES) -> list[str]:
    """Return the last whole lines of a file within `max_bytes`, none from before offset `start`.

    A file that is not there reads as empty; bytes that are not UTF-8 are replaced.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = max(start, size - max_bytes)
            file.seek(begin)
            text = file.read(max_bytes).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = text.splitlines()
    return lines[1:] if begin > start and len(lines) > 1 else lines


def find_error(lines: list[str]) -> str:
    """Return a service's own error: the last traceback's final line or the last line that says ERROR.

    Of the two the later one wins. A traceback's final line is its first one that is not indented. Empty
    when there is neither.
    """
    found = ""
    inside = False
    for line in lines:
        if line.startswith(_TRACEBACK):
            inside = True
        elif inside and line and not line[0].isspace():
            found, inside = line.strip(), False
        elif not inside and _ERROR.search(line):
            found = line.strip()
    return found
