"""A user's manifest: JSON Lines, one conversation with its media and reference answer on each line.

    {"messages": [{"role": "user", "content": "<image>What colour is the shape?"}],
     "images": ["pictures/1.png"], "answer": "red"}

`content` is text with placeholders, whose media are the entries of `images`, `audios`, `videos` in order, or a
list of parts, {"type": "image", "image": "pictures/1.png"} and {"type": "text", "text": "..."}. An encoder of
yours named `depth` reads `<depth>` and `depths`. Relative paths count from the manifest's directory. Other keys
are left alone.

The file is indexed once by line; a line is read and checked when it is asked for. One that is wrong comes back
as a `RowError` in its row's place. No media file is opened here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path

from modalities.base import Modality
from relax.data.conversation import ConversationReader, LineError, MediaRef, Message, Record
from relax.data.errors import ManifestError, RowError

__all__ = ["Manifest", "MediaRef", "Message", "Record", "RowError"]

BUILT_IN_PLACEHOLDERS = {"<image>": "image", "<audio>": "audio", "<video>": "video"}
MAX_LINE_BYTES = 64 << 20
_SCAN_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Manifest:
    """Random access to the rows of a manifest; blank lines are no rows. Keeps 16 bytes a row in memory.

    Args:
        path: The manifest.
        modalities: Encoders by name, for their placeholders; absent: image, audio and video.
        max_prompt_chars: Longest text of a conversation in characters.

    Raises:
        ManifestError: the file is missing, unreadable or has no row.
    """

    def __init__(
        self,
        path: str | Path,
        modalities: Mapping[str, Modality] | None = None,
        *,
        max_prompt_chars: int = 32_768,
    ) -> None:
        self.path = Path(path)
        placeholders = BUILT_IN_PLACEHOLDERS
        if modalities is not None:
            placeholders = {each.placeholder: each.name for each in modalities.values()}
        self._reader = ConversationReader(placeholders, max_prompt_chars)
        self._starts, self._line_numbers, self._num_bytes = _index_lines(self.path)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Record | RowError:
        """Read and check row `index`, counted from 0."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path}: row must be in [0, {len(self)}), got {index}")
        place = f"{self.path.name}:{self._line_numbers[index]}"
        try:
            line = self._read_line(index)
            return self._reader.read(line, index=index, place=place, base_dir=self.path.parent)
        except LineError as problem:
            return RowError(place, str(problem))

    def __iter__(self) -> Iterator[Record | RowError]:
        return (self[index] for index in range(len(self)))

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
