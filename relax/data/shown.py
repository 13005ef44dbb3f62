"""Values of a user's row as they stand in an error message: short, as JSON, with their type."""

from __future__ import annotations

import json
from typing import Any

_SHOWN_CHARS = 80
_KINDS = {bool: "boolean", int: "number", float: "number", list: "list", dict: "object", str: "string"}


def brief(value: Any) -> str:
    """Return `value` as JSON, short, with its type where that says more."""
    if value is None:
        return "nothing"
    words = json.dumps(value, ensure_ascii=False, default=_without_json)
    kind = _KINDS.get(type(value), type(value).__name__)
    return f"{kind} {words[:_SHOWN_CHARS]}{'...' * (len(words) > _SHOWN_CHARS)}"


def brief_text(line: bytes) -> str:
    """Return the beginning of a line, quoted."""
    return repr(line.strip()[:_SHOWN_CHARS].decode("utf-8", "replace"))


def _without_json(value: Any) -> str:
    """Return a word for what JSON cannot hold, such as bytes, a date or a decimal number."""
    return f"{len(value)} bytes" if isinstance(value, bytes) else f"{type(value).__name__} {value}"
