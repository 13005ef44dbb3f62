"""Records to prompts: chat template, token ids with media placeholders, encoded media; and prompts to Arrow.

A prompt's row refers to its media by id and holds none of them; see `relax.data.media`.

Letters: a *placeholder* is what a user writes (`<image>`); a *pad* is the model's token that stands for one media
token (`<|image_pad|>`). The template writes one pad for each media item; here it is repeated as often as the item
has tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from modalities.base import Modality
from modalities.cache import EncodedCache
from modalities.errors import MediaError
from modalities.media import MediaItem, media_id
from modalities.packing import pack_list
from modalities.sources import read_bytes, shown
from modalities.text import Part, join_parts
from relax.data.chat import ChatError, ChatMessage, ChatTokenizer
from relax.data.conversation import MediaRef, Message, Record
from relax.data.errors import ModelDirectoryError, RowError

DEFAULT_CACHE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of the prompts table, without epoch and key columns.

    Shapes: token_ids int32 [num_prompt_tokens]; media are in prompt order.
    """

    index: int
    place: str
    modality: str
    messages: str
    prompt_text: str
    token_ids: np.ndarray
    reference_answer: str
    media_paths: tuple[str, ...]
    media: tuple[MediaItem, ...]
    source: str = ""


class PromptBuilder:
    """Turns records into prompts for one model.

    Args:
        model_dir: Directory with tokenizer, chat template and processor configuration.
        modalities: Encoders by name.
        max_prompt_tokens: Longest prompt in tokens, media included.
        max_prompt_chars: Longest text of a conversation in characters.
        cache_bytes: Encoded media kept in memory.

    Raises:
        ModelDirectoryError: the directory lacks a tokenizer, a template, or a tower's pad token.
    """

    def __init__(
        self,
        model_dir: str | Path,
        modalities: Mapping[str, Modality],
        *,
        max_prompt_tokens: int,
        max_prompt_chars: int = 32_768,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self.max_prompt_tokens = max_prompt_tokens
        self.max_prompt_chars = max_prompt_chars
        self.cache = EncodedCache(cache_bytes)
        self._modalities = dict(modalities)
        self._placeholders = {each.name: each.placeholder for each in modalities.values()}
        self._chat = ChatTokenizer(model_dir)
        self._profile = next(iter(modalities.values())).profile
        self._pad_ids = {
            tower: self._pad_id(model_dir, tower, pad)
            for tower, (_, pad, _) in self._profile.tower_tokens.items()
        }

    def build(self, record: Record) -> Prompt | RowError:
        """Read, decode and encode the record's media and return its prompt; whatever is wrong with it is a RowError."""
        try:
            self._check_length(record)
            chat = [self._chat_message(message) for message in record.messages]
            token_ids = self._chat.encode(chat)
            media = tuple(self._encode(ref, record.base_dir) for ref in record.media)
            if self._profile.film_in_frames:
                token_ids = self._with_frames(token_ids, chat, record.media, media)
            token_ids = self._expand(token_ids, record.media, media)
        except (ChatError, MediaError) as error:
            return RowError(record.place, str(error))
        return Prompt(
            index=record.index,
            place=record.place,
            modality=record.modality,
            messages=_messages_json(record.messages),
            prompt_text="\n".join(self._text(each) for each in record.messages if each.role == "user"),
            token_ids=token_ids,
            reference_answer=record.answer,
            media_paths=tuple(_recorded(ref.source) for ref in record.media),
            media=media,
            source=record.source,
        )

    def _pad_id(self, model_dir: str | Path, tower: str, pad: str) -> int:
        token_id = self._chat.token_id(pad)
        if token_id is None:
            raise ModelDirectoryError(
                f"{model_dir}: tokenizer must have the {tower} tower's token {pad!r}, got none"
            )
        return token_id

    def _check_length(self, record: Record) -> None:
        num_chars = sum(
            len(part.value) for each in record.messages for part in each.parts if part.kind == "text"
        )
        if num_chars > self.max_prompt_chars:
            raise ChatError(
                f"the messages' text must have at most {self.max_prompt_chars} characters, got {num_chars}; "
                "shorten it or raise data.max_prompt_chars"
            )

    def _chat_message(self, message: Message) -> ChatMessage:
        parts = [self._chat_part(part) for part in message.parts]
        has_towers = bool(self._profile.tower_tokens)
        return {"role": message.role, "content": parts if has_towers else "".join(p["text"] for p in parts)}

    def _chat_part(self, part: Part) -> dict[str, str]:
        if part.kind == "text":
            return {"type": "text", "text": part.value}
        if part.kind not in self._modalities:
            known = ", ".join(self._modalities)
            raise ChatError(
                f"modality must be one of {known}, got {part.kind!r}; name its encoder in modalities.extra"
            )
        tower = self._modalities[part.kind].tower
        if tower not in self._profile.tower_tokens:
            towers = ", ".join(self._profile.tower_tokens) or "none"
            raise ChatError(
                f"media must be for a tower of the model ({towers}), got {part.kind!r} for {tower!r}"
            )
        return {"type": tower}

    def _text(self, message: Message) -> str:
        return join_parts(message.parts, self._placeholders)

    def _encode(self, ref: MediaRef, base_dir: Path) -> MediaItem:
        modality = self._modalities[ref.modality]
        try:
            data = ref.data
            if data is None:
                data = read_bytes(ref.source, base_dir=base_dir, limits=modality.limits)
            modality.limits.check_bytes(len(data))
            name = media_id(modality, data)
            encoded = self.cache.encode(modality, data, name)
            return MediaItem(media_id=name, modality=ref.modality, data=data, encoded=encoded)
        except MediaError as error:
            raise error.at(shown(ref.source)) from error

    def _with_frames(
        self,
        token_ids: np.ndarray,
        chat: Sequence[ChatMessage],
        refs: Sequence[MediaRef],
        media: Sequence[MediaItem],
    ) -> np.ndarray:
        """Return the conversation with a placeholder for each temporal patch of its films, its time in words before it.

        Source: the processor of Qwen3-VL. Times are those of evenly spread frames.
        """
        films = [each for ref, each in zip(refs, media, strict=True) if self._tower(ref.modality) == "video"]
        if not films:
            return token_ids
        start, pad, end = self._profile.tower_tokens["video"]
        pieces = self._chat.render(chat).split(f"{start}{pad}{end}")
        if len(pieces) != len(films) + 1:
            raise ChatError(
                f"chat template must write {start}{pad}{end} for each film, {len(films)} of them, "
                f"got {len(pieces) - 1}"
            )
        text = pieces[0]
        for film, piece in zip(films, pieces[1:], strict=True):
            for time_s in _patch_times(film.encoded, self._profile.temporal_patch_size):
                text += f"<{time_s:.1f} seconds>{start}{pad}{end}"
            text += piece
        return self._chat.encode_rendered(text)

    def _tower(self, modality: str) -> str:
        return self._modalities[modality].tower

    def _runs(self, item: MediaItem) -> list[tuple[str, int]]:
        """Return tower and length of each of the item's runs of placeholders."""
        tower, count = self._tower(item.modality), self._modalities[item.modality].num_tokens(item.encoded)
        runs = 1
        if tower == "video" and self._profile.film_in_frames:
            runs = int(item.encoded["grid_thw"][0])
        return [(tower, count // runs)] * runs

    def _expand(
        self, token_ids: np.ndarray, refs: Sequence[MediaRef], media: Sequence[MediaItem]
    ) -> np.ndarray:
        """Repeat each pad as often as its media item has tokens."""
        towers = [self._tower(ref.modality) for ref in refs]
        runs = [run for item in media for run in self._runs(item)]
        at = np.flatnonzero(np.isin(token_ids, list(self._pad_ids.values())))
        wanted = np.array([self._pad_ids[tower] for tower, _ in runs], np.int32)
        if not np.array_equal(token_ids[at], wanted):
            raise ChatError(
                f"chat template must write one pad token for each media item ({', '.join(towers) or 'none'}), "
                f"got {len(at)} pads; the model's template may not know this kind of media"
            )
        counts = np.ones(len(token_ids), np.int64)
        counts[at] = [count for _, count in runs]
        if counts.sum() > self.max_prompt_tokens:
            raise ChatError(
                f"prompt must have at most {self.max_prompt_tokens} tokens, got {counts.sum()} "
                f"({counts[at].sum()} of media); shrink the media or raise data.max_prompt_tokens"
            )
        return np.repeat(token_ids, counts)


def prompts_to_arrow(prompts: Sequence[Prompt]) -> pa.Table:
    """Return the prompts' columns, with the ids of their media; key columns and epoch are the caller's."""
    media_ids = [[item.media_id for item in prompt.media] for prompt in prompts]
    columns: dict[str, pa.Array] = {
        "prompt_index": pa.array([prompt.index for prompt in prompts], pa.int64()),
        "source": pa.array([prompt.source for prompt in prompts], pa.string()),
        "modality": pa.array([prompt.modality for prompt in prompts], pa.string()),
        "messages": pa.array([prompt.messages for prompt in prompts], pa.string()),
        "prompt_text": pa.array([prompt.prompt_text for prompt in prompts], pa.string()),
        "prompt_token_ids": pack_list([[prompt.token_ids] for prompt in prompts], pa.int32()),
        "reference_answer": pa.array([prompt.reference_answer for prompt in prompts], pa.string()),
        "media_paths": pa.array([prompt.media_paths for prompt in prompts], pa.list_(pa.string())),
        "media_ids": pa.array(media_ids, pa.list_(pa.string())),
    }
    return pa.table(columns)


def _patch_times(film: Mapping[str, np.ndarray], frames_per_patch: int) -> np.ndarray:
    """Return the middle, in seconds, between the first and the last frame of each temporal patch."""
    seconds = float(film["second_per_grid"])
    return (np.arange(int(film["grid_thw"][0])) + (frames_per_patch - 1) / frames_per_patch / 2) * seconds


def _messages_json(messages: Sequence[Message]) -> str:
    chat = [
        {
            "role": message.role,
            "content": [
                {"type": part.kind, part.kind: part.value if part.kind == "text" else _recorded(part.value)}
                for part in message.parts
            ],
        }
        for message in messages
    ]
    return json.dumps(chat, ensure_ascii=False)


def _recorded(source: str) -> str:
    """Return the source as it goes into the table; a data URI without its data."""
    return source.partition(",")[0] + ",..." if source.startswith("data:") else source
