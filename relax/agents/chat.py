"""One agent program's conversation: requests of the chat protocol to tokens, without tokenising an answer again.

    request 1   [system, user]                         -> rendered whole: the row's prompt
    answer 1    kept as token ids, and as the message that the program was given
    request 2   [system, user, answer 1, user]         -> what follows answer 1 is rendered and appended

A request has to begin with all messages so far, word for word. Another one is refused, or begins a new conversation
(`rollout.agent.branches`). It opens no socket and asks no engine.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from modalities.errors import MediaError
from relax.agents.chat_messages import (
    ChatRequestError,
    Message,
    answer_message,
    canonical,
    checked_request,
    medium_of,
    parts_of,
)
from relax.agents.config import AgentConfig
from relax.agents.environment import Medium
from relax.agents.episode import Episode
from relax.agents.transcript import Transcript
from relax.agents.turns import Turn, TurnEncoder
from relax.data.chat import ChatError, ChatMessage
from relax.rollout.engine import Completion


class Conversation:
    """The chat of one episode.

    Args:
        episode: Whose transcript is kept.
        turns: Encodes messages.
        config: The limits, and what becomes of branches.
    """

    def __init__(self, episode: Episode, turns: TurnEncoder, config: AgentConfig) -> None:
        self.episode = episode
        self._turns = turns
        self._config = config
        self._known: list[Message] = []
        self._asked: list[Message] = []
        self._transcript = _empty()
        episode.transcript = self._transcript

    @property
    def transcript(self) -> Transcript:
        """The conversation that the request in hand goes on with."""
        return self._transcript

    def ask(self, body: Any) -> int:
        """Take a request; the transcript then is what its answer follows. Return the longest answer in tokens; 0: no
        limit of its own.

        Raises:
            ChatRequestError: the request is not one, is refused, or does not fit the limits.
        """
        messages, max_tokens = checked_request(body)
        plain = [canonical(message) for message in messages]
        tools = {"tools": body["tools"]} if body.get("tools") else {}
        follows = bool(self._known) and plain[: len(self._known)] == self._known
        new = messages[len(self._known) :] if follows else messages
        if follows and not new:
            raise ChatRequestError("messages: must go on from the last answer, got nothing after it")
        if self._known and not follows and self._config.branches == "refuse":
            raise ChatRequestError(
                f"messages: must begin with the {len(self._known)} so far, word for word, got others from number "
                f"{_first_difference(plain, self._known)} on; rollout.agent.branches=last would begin anew",
                status=409,
                code="conversation_changed",
            )
        try:
            chat = [self._chat_message(message) for message in new]
            media = [medium for _, found in chat for medium in found]
            turn = self._turn([message for message, _ in chat], media, tools, follows=follows)
        except (ChatError, MediaError) as error:
            raise ChatRequestError(f"messages: {error}") from error
        transcript = self._transcript if follows else _empty()
        self._check_limits(transcript, turn)
        if self._known and not follows:
            self.episode.num_branches += 1
        transcript.observe(turn.token_ids, turn.items)
        self._transcript, self._asked = transcript, plain
        return max_tokens

    def answer(self, completion: Completion) -> dict[str, Any]:
        """Keep an answer, and return it as the protocol's."""
        episode, asked = self.episode, self._transcript.num_tokens
        self._transcript.answer(completion)
        episode.transcript = self._transcript
        episode.texts.append(completion.text)
        message, reason = answer_message(completion)
        self._known = [*self._asked, canonical(message)]
        return {
            "id": f"chatcmpl-{hashlib.blake2b(completion.uid.encode(), digest_size=8).hexdigest()}-{asked}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
            "usage": {
                "prompt_tokens": asked,
                "completion_tokens": len(completion.token_ids),
                "total_tokens": asked + len(completion.token_ids),
            },
        }

    def _turn(
        self, chat: Sequence[ChatMessage], media: Sequence[Medium], tools: dict[str, Any], *, follows: bool
    ) -> Turn:
        if not follows:
            return self._turns.whole(chat, media, **tools)
        if any(message["role"] == "assistant" for message in chat):
            raise ChatError("messages after the last answer must not be the assistant's")
        if self._turns.names_media(self._transcript.last_answer):
            raise ChatError("the last answer holds the model's tokens for media and cannot be gone on from")
        turn = self._turns.following_messages(chat, media, **tools)
        return self._turns.after_answer(self._transcript.last_token, turn)

    def _check_limits(self, transcript: Transcript, turn: Turn) -> None:
        config, num_tokens = self._config, transcript.num_tokens + len(turn.token_ids)
        if transcript.num_turns >= config.max_turns:
            self.episode.cut = True
            raise ChatRequestError(
                f"messages: an episode must have at most {config.max_turns} answers, got another request",
                code="max_turns_exceeded",
            )
        if num_tokens >= config.max_episode_tokens:
            self.episode.cut = True
            raise ChatRequestError(
                f"messages: an episode must have fewer than {config.max_episode_tokens} tokens, got {num_tokens}",
                code="context_length_exceeded",
            )

    def _chat_message(self, message: Message) -> tuple[ChatMessage, list[Medium]]:
        parts: list[dict[str, str]] = []
        media: list[Medium] = []
        for part in parts_of(message.get("content")):
            if part["type"] == "text":
                parts.append({"type": "text", "text": part["text"]})
            else:
                medium = medium_of(part)
                media.append(medium)
                parts.append(self._turns.chat_part(medium))
        made: ChatMessage = {"role": message["role"], "content": parts}
        if message.get("tool_calls"):
            made["tool_calls"] = message["tool_calls"]
        return made, media


def _empty() -> Transcript:
    return Transcript(np.empty(0, np.int32), {}, ())


def _first_difference(messages: Sequence[Message], known: Sequence[Message]) -> int:
    same = [ours == theirs for ours, theirs in zip(messages, known, strict=False)]
    return same.index(False) if False in same else len(same)
