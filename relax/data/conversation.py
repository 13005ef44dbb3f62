"""One row to a checked record. Nothing is read from disk here; only whether a path exists is asked.

A row is {"messages": [...], "images": [...], "answer": "..."}; see `relax.data.manifest` for the whole shape. A media
item is given by its path, data URI, member of an archive or URL, by its bytes, or as {"bytes": ..., "path": ...}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modalities.sources import find_missing
from modalities.text import Part, split_parts
from relax.data.errors import LineError
from relax.data.shown import brief

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Message:
    """One turn: its role and its parts; a media part's value is its source."""

    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class MediaRef:
    """One media item: the modality that reads it and where its bytes are, or a name for them and they themselves."""

    modality: str
    source: str
    data: bytes | None = None


@dataclass(frozen=True)
class Record:
    """A checked row.

    `index` counts the source's rows from 0, `place` names file and line for messages, `modality` joins the
    names of the row's modalities ("audio+image", "text" without media), `media` is in prompt order, `source` is the
    name of the source or evaluation set.
    """

    index: int
    place: str
    base_dir: Path
    messages: tuple[Message, ...]
    media: tuple[MediaRef, ...]
    modality: str
    answer: str
    source: str = ""


class _RowMedia:
    """The media of one row: those that wait for their placeholder, and the bytes that the row itself holds."""

    def __init__(self, place: str) -> None:
        self.waiting: dict[str, list[str]] = {}
        self.data: dict[str, bytes] = {}
        self._place = place

    def source(self, value: Any) -> str | None:
        """Return the source that a path, bytes or a struct of them stands for; None for what is none of these."""
        if isinstance(value, Mapping):
            data, path = value.get("bytes"), value.get("path") or value.get("url")
            return self._named(data, path) if isinstance(data, bytes) else self.source(path)
        if isinstance(value, bytes):
            return self._named(value, None)
        return value if isinstance(value, str) and value else None

    def _named(self, data: bytes, path: Any) -> str:
        name = f"{self._place}#{len(self.data)}{f' {path}' if isinstance(path, str) else ''}"
        self.data[name] = data
        return name


class ConversationReader:
    """Checks rows against the modalities that are loaded.

    Args:
        placeholders: Modality name by placeholder, such as {"<image>": "image"}.
        max_prompt_chars: Longest text of a conversation in characters.
    """

    def __init__(self, placeholders: Mapping[str, str], max_prompt_chars: int) -> None:
        self._placeholders = dict(placeholders)
        self._names = list(self._placeholders.values())
        self._max_prompt_chars = max_prompt_chars

    def read(self, content: Mapping[str, Any], *, index: int, place: str, base_dir: Path) -> Record:
        """Return the record of one row.

        Raises:
            LineError: the row breaks a rule; the first one found is named.
        """
        found = _RowMedia(place)
        self._list_sources(content, found)
        messages = tuple(
            self._message(number, each, found) for number, each in enumerate(_messages_of(content))
        )
        if messages[-1].role != "user":
            raise LineError(f"the last message must be the user's, got role {messages[-1].role!r}")
        self._check_leftovers(content, found.waiting)
        self._check_text(content, messages)
        parts = [part for each in messages for part in each.parts if part.kind != "text"]
        media = tuple(MediaRef(kind, source, found.data.get(source)) for kind, source in parts)
        for ref in media:
            problem = find_missing(ref.source, base_dir=base_dir) if ref.data is None else None
            if problem:
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

    def _list_sources(self, content: Mapping[str, Any], found: _RowMedia) -> None:
        """Note, by modality, the media that wait for their placeholder."""
        for name in self._names:
            listed = content.get(f"{name}s")
            if listed is None:
                listed = []
            sources = [found.source(each) for each in listed] if isinstance(listed, list) else [None]
            if None in sources:
                raise LineError(f"{name}s must be a list of paths, got {brief(listed)}")
            found.waiting[name] = [each for each in sources if each]

    def _message(self, number: int, message: Any, found: _RowMedia) -> Message:
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise LineError(f"{where} must be an object with role and content, got {brief(message)}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise LineError(f"{where}.role must be one of {', '.join(ROLES)}, got {brief(role)}")
        if isinstance(content, str):
            parts = split_parts(content, self._placeholders)
        elif isinstance(content, list):
            parts = [self._part(f"{where}.content[{each}]", part, found) for each, part in enumerate(content)]
        else:
            raise LineError(f"{where}.content must be text or a list of parts, got {brief(content)}")
        if not any(part.kind != "text" or part.value for part in parts):
            raise LineError(f"{where}.content must not be empty, got {brief(content)}")
        return Message(role, tuple(_with_source(where, part, found.waiting) for part in parts))

    def _part(self, where: str, part: Any, found: _RowMedia) -> Part:
        kinds = ["text", *self._names]
        part = _as_ours(part)
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise LineError(
                f"{where} must be an object whose type is one of {', '.join(kinds)}, got {brief(part)}"
            )
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise LineError(f"{where}.text must be a string, got {brief(part.get('text'))}")
            return Part("text", part["text"])
        given = next((part[key] for key in (kind, "path", "url") if part.get(key) is not None), None)
        source = found.source(given) or found.source(part)
        if source is None and given not in (None, "") and not _is_empty(given):
            raise LineError(f"{where}.{kind} must be a path or bytes, got {brief(given)}")
        return Part(kind, source or "")

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


def _as_ours(part: Any) -> Any:
    """Return a part of an OpenAI request (`image_url`, `input_audio` and their like) as one of ours."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or not isinstance(part.get(kind), dict | str):
        return part
    if kind.endswith("_url"):
        name = kind.removesuffix("_url")
        return {"type": name, name: part[kind]}
    if kind == "input_audio" and isinstance(part[kind], dict):
        sound = part[kind]
        return {"type": "audio", "audio": f"data:audio/{sound.get('format')};base64,{sound.get('data')}"}
    return part


def _is_empty(value: Any) -> bool:
    """Whether a column's struct holds nothing, as those of parts without media do."""
    return isinstance(value, Mapping) and all(each is None for each in value.values())


def _messages_of(content: Mapping[str, Any]) -> list[Any]:
    messages = content.get("messages")
    if not isinstance(messages, list) or not messages:
        raise LineError(f"messages must be a list with at least one message, got {brief(messages)}")
    return messages


def _answer_of(content: Mapping[str, Any]) -> str:
    answer = content.get("answer")
    if isinstance(answer, int | float):
        shown = json.dumps(answer)
        raise LineError(f'answer must be a string, got {brief(answer)}; write "{shown}"')
    if not isinstance(answer, str) or not answer:
        raise LineError(f"answer must be a string with something in it, got {brief(answer)}")
    return answer
