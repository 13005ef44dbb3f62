"""One manifest line to a checked record. Nothing is read from disk here; only whether a path exists is asked.

A line is {"messages": [...], "images": [...], "answer": "..."}; see `relax.data.manifest` for the whole shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modalities.sources import find_missing
from modalities.text import Part, split_parts

ROLES = ("system", "user", "assistant")
_SHOWN_CHARS = 80


@dataclass(frozen=True)
class Message:
    """One turn: its role and its parts; a media part's value is its source."""

    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class MediaRef:
    """One media item: the modality that reads it and where its bytes are."""

    modality: str
    source: str


@dataclass(frozen=True)
class Record:
    """A checked line.

    `index` counts the manifest's rows from 0, `place` names file and line for messages, `modality` joins the
    names of the row's modalities ("audio+image", "text" without media), `media` is in prompt order.
    """

    index: int
    place: str
    base_dir: Path
    messages: tuple[Message, ...]
    media: tuple[MediaRef, ...]
    modality: str
    answer: str


class LineError(ValueError):
    """Why a line is no record: the rule and the value that broke it. The manifest makes a `RowError` of it."""


class ConversationReader:
    """Checks lines against the modalities that are loaded.

    Args:
        placeholders: Modality name by placeholder, such as {"<image>": "image"}.
        max_prompt_chars: Longest text of a conversation in characters.
    """

    def __init__(self, placeholders: Mapping[str, str], max_prompt_chars: int) -> None:
        self._placeholders = dict(placeholders)
        self._names = list(self._placeholders.values())
        self._max_prompt_chars = max_prompt_chars

    def read(self, line: bytes, *, index: int, place: str, base_dir: Path) -> Record:
        """Return the record of one line.

        Raises:
            LineError: the line breaks a rule; the first one found is named.
        """
        content = _parse(line)
        waiting = self._listed_sources(content)
        messages = tuple(
            self._message(number, each, waiting) for number, each in enumerate(_messages_of(content))
        )
        if messages[-1].role != "user":
            raise LineError(f"the last message must be the user's, got role {messages[-1].role!r}")
        self._check_leftovers(content, waiting)
        self._check_text(content, messages)
        media = tuple(MediaRef(*part) for each in messages for part in each.parts if part.kind != "text")
        for ref in media:
            if problem := find_missing(ref.source, base_dir=base_dir):
                raise LineError(f"{ref.modality} {problem}")
        return Record(
            index=index,
            place=place,
            base_dir=base_dir,
            messages=messages,
            media=media,
            modality="+".join(sorted({ref.modality for ref in media})) or "text",
            answer=_answer_of(content),
        )

    def _listed_sources(self, content: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return, by modality, the paths that wait for their placeholder."""
        waiting = {}
        for name in self._names:
            listed = content.get(f"{name}s")
            if listed is None:
                listed = []
            if not isinstance(listed, list) or not all(isinstance(each, str) and each for each in listed):
                raise LineError(f"{name}s must be a list of paths, got {_brief(listed)}")
            waiting[name] = list(listed)
        return waiting

    def _message(self, number: int, message: Any, waiting: dict[str, list[str]]) -> Message:
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise LineError(f"{where} must be an object with role and content, got {_brief(message)}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise LineError(f"{where}.role must be one of {', '.join(ROLES)}, got {_brief(role)}")
        if isinstance(content, str):
            parts = split_parts(content, self._placeholders)
        elif isinstance(content, list):
            parts = [self._part(f"{where}.content[{each}]", part) for each, part in enumerate(content)]
        else:
            raise LineError(f"{where}.content must be text or a list of parts, got {_brief(content)}")
        if not any(part.kind != "text" or part.value for part in parts):
            raise LineError(f"{where}.content must not be empty, got {_brief(content)}")
        return Message(role, tuple(_with_source(where, part, waiting) for part in parts))

    def _part(self, where: str, part: Any) -> Part:
        kinds = ["text", *self._names]
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise LineError(
                f"{where} must be an object whose type is one of {', '.join(kinds)}, got {_brief(part)}"
            )
        keys = ("text",) if kind == "text" else (kind, "path", "url")
        given = next((part[key] for key in keys if part.get(key) is not None), None if kind == "text" else "")
        if not isinstance(given, str):
            raise LineError(f"{where}.{kind} must be a string, got {_brief(given)}")
        return Part(kind, given)

    def _check_leftovers(self, content: Mapping[str, Any], waiting: Mapping[str, list[str]]) -> None:
        for name, unused in waiting.items():
            if unused:
                total = len(content[f"{name}s"])
                raise LineError(
                    f"{name}s must hold one path for each <{name}> of the messages, "
                    f"got {total} paths for {total - len(unused)}"
                )

    def _check_text(self, content: Mapping[str, Any], messages: tuple[Message, ...]) -> None:
        text = [part.value for each in messages for part in each.parts if part.kind == "text"]
        num_chars = sum(map(len, text))
        if num_chars > self._max_prompt_chars:
            raise LineError(
                f"the messages' text must have at most {self._max_prompt_chars} characters, got {num_chars}; "
                "shorten it or raise data.max_prompt_chars"
            )
        for key, value in content.items():
            # Media of an encoder that is not loaded would otherwise be read as plain text, silently.
            strange = key.endswith("s") and isinstance(value, list) and key[:-1] not in self._names
            if strange and any(f"<{key[:-1]}>" in piece for piece in text):
                raise LineError(
                    f"<{key[:-1]}> must belong to a loaded modality ({', '.join(self._names)}), got {key}; "
                    "name its encoder in modalities.extra"
                )


def _with_source(where: str, part: Part, waiting: dict[str, list[str]]) -> Part:
    if part.kind == "text" or part.value:
        return part
    if not waiting[part.kind]:
        raise LineError(
            f"{part.kind}s must hold one path for each <{part.kind}> of the messages, got none left for {where}"
        )
    return Part(part.kind, waiting[part.kind].pop(0))


def _parse(line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise LineError(f"line must be UTF-8, got byte {line[error.start]:#04x} at {error.start}") from error
    except RecursionError as error:
        raise LineError("line must be JSON, got one that is nested too deeply") from error
    except ValueError as error:
        raise LineError(f"line must be JSON, got {_brief_text(line)}: {error}") from error
    if not isinstance(content, dict):
        raise LineError(f"line must be a JSON object, got {_brief(content)}")
    return content


def _messages_of(content: Mapping[str, Any]) -> list[Any]:
    messages = content.get("messages")
    if not isinstance(messages, list) or not messages:
        raise LineError(f"messages must be a list with at least one message, got {_brief(messages)}")
    return messages


def _answer_of(content: Mapping[str, Any]) -> str:
    answer = content.get("answer")
    if isinstance(answer, int | float):
        shown = json.dumps(answer)
        raise LineError(f'answer must be a string, got {_brief(answer)}; write "{shown}"')
    if not isinstance(answer, str) or not answer:
        raise LineError(f"answer must be a string with something in it, got {_brief(answer)}")
    return answer


def _brief(value: Any) -> str:
    """Return `value` as JSON, short, with its type where that says more."""
    if value is None:
        return "nothing"
    kind = {bool: "boolean", int: "number", float: "number", list: "list", dict: "object", str: "string"}
    shown = json.dumps(value, ensure_ascii=False)
    return f"{kind.get(type(value), type(value).__name__)} {shown[:_SHOWN_CHARS]}{'...' * (len(shown) > _SHOWN_CHARS)}"


def _brief_text(line: bytes) -> str:
    shown = line.strip()[:_SHOWN_CHARS].decode("utf-8", "replace")
    return repr(shown)
