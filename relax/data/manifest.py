"""A source of prompts: its rows as checked records, whatever its format (`sources/`) and layout (`layouts.py`).

As JSON Lines in the layout `messages`, one conversation with its media and reference answer on each line:

    {"messages": [{"role": "user", "content": "<image>What colour is the shape?"}],
     "images": ["pictures/1.png"], "answer": "red"}

`content` is text with placeholders, whose media are the entries of `images`, `audios`, `videos` in order, or a
list of parts, {"type": "image", "image": "pictures/1.png"} and {"type": "text", "text": "..."}. An encoder of
yours named `depth` reads `<depth>` and `depths`. Relative paths count from the manifest's directory. Other keys
are left alone.

A row is read and checked when it is asked for. One that is wrong comes back as a `RowError` in its row's place. No
media file is opened here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from modalities.base import Modality
from relax.data.config import SourceConfig
from relax.data.conversation import ConversationReader, MediaRef, Message, Record
from relax.data.errors import LineError, RowError
from relax.data.layouts import Layout
from relax.data.sources import JSON_SUFFIXES, check_there, open_rows

__all__ = ["Manifest", "MediaRef", "Message", "Record", "RowError"]

BUILT_IN_PLACEHOLDERS = {"<image>": "image", "<audio>": "audio", "<video>": "video"}


class Manifest:
    """Random access to the rows of a source.

    Args:
        source: Where it is and how its rows are read, or the path alone for rows in the layout `messages`.
        modalities: Encoders by name, for their placeholders; absent: image, audio and video.
        max_prompt_chars: Longest text of a conversation in characters.
        name: What its rows are recorded under.

    Raises:
        ManifestError: it is missing or unreadable, has no row, or lacks a column that its layout needs.
    """

    def __init__(
        self,
        source: SourceConfig | str | Path,
        modalities: Mapping[str, Modality] | None = None,
        *,
        max_prompt_chars: int = 32_768,
        name: str = "",
    ) -> None:
        config = source if isinstance(source, SourceConfig) else SourceConfig(path=str(source))
        self.path, self.name = Path(config.path), name
        placeholders = _placeholders(modalities)
        self._reader = ConversationReader(placeholders, max_prompt_chars)
        self._layout = Layout(config.layout, config.fields, placeholders)
        self._rows = open_rows(self.path, self._layout.columns())
        if self._rows.column_names is not None:
            self._layout.check_columns(self._rows.column_names)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record | RowError:
        """Read and check row `index`, counted from 0."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path}: row must be in [0, {len(self)}), got {index}")
        place = self._rows.place(index)
        try:
            content = self._layout.read(self._rows.read(index))
            record = self._reader.read(content, index=index, place=place, base_dir=self._rows.base_dir)
        except LineError as problem:
            return RowError(place, str(problem))
        return replace(record, source=self.name) if self.name else record

    def __iter__(self) -> Iterator[Record | RowError]:
        return (self[index] for index in range(len(self)))


def check_source(source: SourceConfig, modalities: Mapping[str, Modality]) -> None:
    """Look whether a source can be used; its rows are not read, and a text file is not indexed.

    Raises:
        ManifestError: it is missing, empty or damaged, or its layout needs a column that it lacks.
    """
    check_there(source.path)
    layout = Layout(source.layout, source.fields, _placeholders(modalities))
    if Path(source.path).suffix not in JSON_SUFFIXES:
        rows = open_rows(source.path, layout.columns())
        layout.check_columns(rows.column_names or ())


def _placeholders(modalities: Mapping[str, Modality] | None) -> dict[str, str]:
    if modalities is None:
        return BUILT_IN_PLACEHOLDERS
    return {each.placeholder: each.name for each in modalities.values()}
