"""Questions as parts: text between placeholders. No file is read and nothing is tokenised here."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple


class Part(NamedTuple):
    """A piece of a message: `kind` is "text" or a modality's name; `value` is the text, or the source if known."""

    kind: str
    value: str


def split_parts(content: str, placeholders: dict[str, str]) -> list[Part]:
    """Split a message at its placeholders.

    Args:
        content: The message as it was written.
        placeholders: Modality name by placeholder, such as {"<image>": "image"}.

    Returns:
        The parts in order; a media part has an empty value, an empty text part is left out.
    """
    if not placeholders:
        return [Part("text", content)] if content else []
    pattern = "|".join(re.escape(each) for each in sorted(placeholders, key=len, reverse=True))
    parts = []
    for piece in re.split(f"({pattern})", content):
        if piece in placeholders:
            parts.append(Part(placeholders[piece], ""))
        elif piece:
            parts.append(Part("text", piece))
    return parts


def join_parts(parts: Collection[Part], placeholders_by_name: dict[str, str]) -> str:
    """Return the message as text, each media part as its placeholder."""
    return "".join(part.value if part.kind == "text" else placeholders_by_name[part.kind] for part in parts)
