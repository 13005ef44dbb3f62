"""JSON Lines. The file is indexed once by line; a line is read when it is asked for."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from relax.data.errors import LineError, ManifestError
from relax.data.shown import brief, brief_text

MAX_LINE_BYTES = 64 << 20
_SCAN_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonRows:
    """The objects of a file, one a line; blank lines are no rows. Keeps 16 bytes a row in memory.

    Raises:
        ManifestError: the file is missing, unreadable or has no row.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.base_dir = path, path.parent
        self.column_names: tuple[str, ...] | None = None
        self._starts, self._line_numbers, self._num_bytes = _index_lines(path)

    def __len__(self) -> int:
        return len(self._starts)

    def place(self, index: int) -> str:
        """Return file and line, counted from 1."""
        return f"{self.path.name}:{self._line_numbers[index]}"

    def read(self, index: int) -> dict[str, Any]:
        """Return the object of row `index`.

        Raises:
            LineError: the line is too long, unreadable or no JSON object.
        """
        return _parse(self._read_line(index))

    def _read_line(self, index: int) -> bytes:
        start = self._starts[index]
        end = self._starts[index + 1] if index + 1 < len(self) else self._num_bytes
        if end - start > MAX_LINE_BYTES:
            raise LineError(f"line must have at most {MAX_LINE_BYTES} bytes, got {end - start}")
        try:
            with open(self.path, "rb") as file:
                file.seek(start)
                # Blank lines up to the next row are white space to JSON.
                line = file.read(end - start)
        except OSError as error:
            raise LineError(f"line must be readable, got {error.strerror}") from error
        return line if start else line.removeprefix(_BYTE_ORDER_MARK)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise LineError(f"line must be UTF-8, got byte {line[error.start]:#04x} at {error.start}") from error
    except RecursionError as error:
        raise LineError("line must be JSON, got one that is nested too deeply") from error
    except ValueError as error:
        raise LineError(f"line must be JSON, got {brief_text(line)}: {error}") from error
    if not isinstance(content, dict):
        raise LineError(f"line must be a JSON object, got {brief(content)}")
    return content


def _index_lines(path: Path) -> tuple[array[int], array[int], int]:
    """Return where each row starts (bytes), its line number from 1, and the file's size; a line is never held whole."""
    starts, numbers = array("q"), array("q")
    position, number, at_line_start, is_row = 0, 1, True, False
    start = 0
    try:
        with open(path, "rb") as file:
            while piece := file.readline(_SCAN_BYTES):
                if at_line_start:
                    start, is_row = position, False
                if not is_row and piece.strip():
                    is_row = True
                    starts.append(start)
                    numbers.append(number)
                position += len(piece)
                at_line_start = piece.endswith(b"\n")
                number += at_line_start
    except OSError as error:
        raise ManifestError(f"{path}: manifest must be a readable file, got: {error.strerror}") from error
    if not starts:
        raise ManifestError(
            f"{path}: manifest must have a row, got an empty file; write one JSON object on each line"
        )
    return starts, numbers, position
