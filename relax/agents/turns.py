"""Messages to the tokens that a conversation goes on with, by the model's own chat template. No model, no torch.

    ... answer <|im_end|> | \\n <|im_start|>user\\n words and media <|im_end|>\\n <|im_start|>assistant\\n | answer ...

What stands between two answers is cut out of the rendering of a short conversation, so the history is not rendered, and
not tokenised, again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modalities.base import Modality
from modalities.cache import EncodedCache
from modalities.media import MediaItem, media_id
from relax.agents.environment import Medium, Observation
from relax.data.chat import ChatError, ChatMessage, ChatTokenizer

ASKED: ChatMessage = {"role": "user", "content": [{"type": "text", "text": "a"}]}
MARK = "relaxanswerends"
"""Stands for an answer in the short conversation; no template changes it."""


@dataclass(frozen=True)
class Turn:
    """Tokens that are not the policy's, and the media that they stand for, in order."""

    token_ids: np.ndarray
    items: tuple[MediaItem, ...] = ()


class TurnEncoder:
    """Encodes messages for one model.

    Args:
        model_dir: Directory with tokenizer and chat template.
        modalities: Encoders by name.
        cache_bytes: Encoded media kept in memory.

    Raises:
        ChatError: the chat template does not keep an answer as it is.
    """

    def __init__(
        self, model_dir: str | Path, modalities: Mapping[str, Modality], *, cache_bytes: int = 64 << 20
    ) -> None:
        self.chat = ChatTokenizer(model_dir)
        self._modalities = dict(modalities)
        self._cache = EncodedCache(cache_bytes)
        names = {each.tower: each.profile.tower_tokens[each.tower] for each in modalities.values()}
        ids = {
            tower: [self.chat.token_id(token) for token in tokens if token] for tower, tokens in names.items()
        }
        self._pads = {tower: self.chat.token_id(tokens[1]) for tower, tokens in names.items()}
        self._media_tokens = sorted({each for row in ids.values() for each in row if each is not None})
        self._beginning = self.chat.encode([ASKED], lambda messages: self._generation_prompt())

    def following(self, observation: Observation) -> Turn:
        """Return what follows an answer: its end, the observation's message, and the beginning of the next answer.

        Raises:
            ChatError: the template refuses the message, or its text holds special tokens.
            modalities.errors.MediaError: a medium cannot be read.
        """
        return self.following_messages([_message(observation, self._modalities)], observation.media)

    def following_messages(
        self, messages: Sequence[ChatMessage], media: Sequence[Medium], **also: Any
    ) -> Turn:
        """Return what follows an answer when these messages do, their media being `media` in order."""

        def render(given: Sequence[ChatMessage]) -> str:
            for content in (MARK, [{"type": "text", "text": MARK}]):  # templates know one form or both
                answer: ChatMessage = {"role": "assistant", "content": content}
                _, mark, rest = self.chat.render([ASKED, answer, *given], **also).rpartition(MARK)
                if mark:
                    return rest
            raise ChatError("chat template must keep an answer as it is, got one that leaves it out")

        return self._expanded(self.chat.encode(messages, render), media)

    def asked(self, observation: Observation) -> Turn:
        """Return an observation's message, and the beginning of the answer, for a prompt without its own beginning."""

        def render(given: Sequence[ChatMessage]) -> str:
            return self._rest(self.chat.render([ASKED, *given]), self.chat.render([ASKED], answered=False))

        return self._expanded(
            self.chat.encode([_message(observation, self._modalities)], render), observation.media
        )

    def whole(self, messages: Sequence[ChatMessage], media: Sequence[Medium], **also: Any) -> Turn:
        """Return a conversation from its beginning."""
        return self._expanded(
            self.chat.encode(messages, lambda given: self.chat.render(given, **also)), media
        )

    def without_beginning(self, prompt_token_ids: np.ndarray) -> np.ndarray:
        """Return a prompt without the tokens that begin the model's answer.

        Raises:
            ChatError: it does not end with them.
        """
        count = len(self._beginning)
        if not count or not np.array_equal(prompt_token_ids[-count:], self._beginning):
            raise ChatError(
                f"prompt must end with the beginning of an answer, tokens {self._beginning.tolist()}, "
                f"got {prompt_token_ids[-count:].tolist()}"
            )
        return prompt_token_ids[:-count]

    def after_answer(self, last_token: int, turn: Turn) -> Turn:
        """Return a turn from `following` without the end token that the policy sampled itself."""
        if len(turn.token_ids) and turn.token_ids[0] == last_token:
            return Turn(turn.token_ids[1:], turn.items)
        return turn

    def names_media(self, token_ids: np.ndarray) -> bool:
        """Whether the policy sampled a token that stands for media, or begins or ends them."""
        return bool(np.isin(token_ids, self._media_tokens).any())

    def chat_part(self, medium: Medium) -> dict[str, str]:
        """Return the part of a message that stands for a medium."""
        return _part(medium, self._modalities)

    def _generation_prompt(self) -> str:
        return self._rest(self.chat.render([ASKED]), self.chat.render([ASKED], answered=False))

    @staticmethod
    def _rest(whole: str, beginning: str) -> str:
        if not whole.startswith(beginning):
            raise ChatError(
                f"chat template must add to a conversation behind its end, got {whole!r} after {beginning!r}"
            )
        return whole[len(beginning) :]

    def _expanded(self, token_ids: np.ndarray, media: Sequence[Medium]) -> Turn:
        """Repeat each pad as often as its medium has tokens."""
        items = tuple(self._item(medium) for medium in media)
        kinds = [self._modalities[item.modality] for item in items]
        wanted = [self._pads[kind.tower] for kind in kinds]
        at = np.flatnonzero(np.isin(token_ids, [pad for pad in self._pads.values() if pad is not None]))
        if token_ids[at].tolist() != wanted:
            raise ChatError(
                f"chat template must write one pad token for each of {len(items)} media, got {len(at)} pads"
            )
        counts = np.ones(len(token_ids), np.int64)
        counts[at] = [kind.num_tokens(item.encoded) for kind, item in zip(kinds, items, strict=True)]
        return Turn(np.repeat(token_ids, counts), items)

    def _item(self, medium: Medium) -> MediaItem:
        modality = self._modalities[medium.modality]
        modality.limits.check_bytes(len(medium.data))
        name = media_id(modality, medium.data)
        encoded = self._cache.encode(modality, medium.data, name)
        return MediaItem(media_id=name, modality=medium.modality, data=medium.data, encoded=encoded)


def _message(observation: Observation, modalities: Mapping[str, Modality]) -> ChatMessage:
    parts = [_part(medium, modalities) for medium in observation.media]
    if observation.text or not parts:
        parts.append({"type": "text", "text": observation.text})
    return {"role": observation.role, "content": parts}


def _part(medium: Medium, modalities: Mapping[str, Modality]) -> dict[str, str]:
    if medium.modality not in modalities:
        raise ChatError(f"modality must be one of {', '.join(modalities)}, got {medium.modality!r}")
    return {"type": modalities[medium.modality].tower}
