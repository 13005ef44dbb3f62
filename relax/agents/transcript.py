"""The tokens of one episode, exactly as they were sampled and observed. Numpy only; it asks no engine and no template.

    prompt | answer of turn 1 | observation | answer of turn 2 | ...
           |<--------------- completion ------------------->|
    loss mask  1 1 1 1          0 0 0 0       1 1 1

Nothing is ever tokenised again: a turn's request has the history's ids, and its answer's ids are appended to them. An
observation behind the last answer is not part of the completion, for nothing was sampled after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from modalities.base import Encoded, tower_of
from modalities.media import MediaItem
from relax.rollout.engine import Completion


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What an episode was: arrays have an entry for each token after the prompt, up to the last one sampled."""

    token_ids: np.ndarray
    """int32 [num_completion_tokens]."""
    loss_mask: np.ndarray
    """bool [num_completion_tokens]: sampled by the policy; False: observed."""
    logprobs: np.ndarray
    """float32 [num_completion_tokens], nats; 0 where observed."""
    token_policy_versions: np.ndarray
    """int32 [num_completion_tokens]; of observed tokens, that of the token before."""
    routed_experts: np.ndarray | None
    """[num_prompt_tokens + num_completion_tokens - 1, num_layers, top_k]: for each token, of the turn that was the
    first to read it; None: not reported."""
    media_ids: tuple[str, ...]
    """Of the prompt and of what was observed up to there."""


class Transcript:
    """What one episode's conversation is in tokens and media.

    Args:
        token_ids: The prompt, placeholders expanded.
        media: Its media by tower.
        media_ids: Their ids, in prompt order.
    """

    def __init__(
        self, token_ids: np.ndarray, media: Mapping[str, Sequence[Encoded]], media_ids: Sequence[str]
    ) -> None:
        self.num_turns = 0
        self.items: list[MediaItem] = []
        """Media that were observed."""
        self._prompt = np.asarray(token_ids, np.int32)
        self._parts: list[np.ndarray] = [self._prompt]
        self._answers: list[tuple[int, Completion]] = []
        self._media = {tower: list(items) for tower, items in media.items()}
        self._media_ids = list(media_ids)
        self._num_media = len(media_ids)
        self._routes: list[np.ndarray] | None = []

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._parts))

    @property
    def prompt_token_ids(self) -> np.ndarray:
        """The prompt, with what was observed before the first turn."""
        return self._prompt

    @property
    def token_ids(self) -> np.ndarray:
        """Everything so far, int32: what the next turn follows."""
        return np.concatenate(self._parts)

    @property
    def media(self) -> dict[str, list[Encoded]]:
        """All media so far by tower, in order."""
        return {tower: list(items) for tower, items in self._media.items()}

    @property
    def media_ids(self) -> tuple[str, ...]:
        return tuple(self._media_ids)

    @property
    def last_token(self) -> int:
        return int(self._parts[-1][-1])

    @property
    def last_answer(self) -> np.ndarray:
        """The tokens that the policy sampled last."""
        return self._answers[-1][1].token_ids if self._answers else np.empty(0, np.int32)

    def observe(self, token_ids: np.ndarray, items: Sequence[MediaItem] = ()) -> None:
        """Append tokens that the policy did not sample, and the media that they stand for; before the first turn they
        become part of the prompt."""
        self._parts.append(np.asarray(token_ids, np.int32))
        for item in items:
            self._media.setdefault(tower_of(item.encoded), []).append(item.encoded)
            self._media_ids.append(item.media_id)
            self.items.append(item)
        if not self.num_turns:
            self._take_as_prompt(self.token_ids)

    def replace_prompt(self, token_ids: np.ndarray) -> None:
        """Take other tokens for the prompt, before the first turn; media stay."""
        if self.num_turns:
            raise ValueError(
                f"transcript: the prompt must be replaced before the first turn, got {self.num_turns} turns"
            )
        self._take_as_prompt(np.asarray(token_ids, np.int32))

    def answer(self, completion: Completion) -> None:
        """Append what the policy sampled; nothing where it sampled nothing."""
        if not len(completion.token_ids):
            return
        self._answers.append((self.num_tokens, completion))
        self._parts.append(np.asarray(completion.token_ids, np.int32))
        self._num_media = len(self._media_ids)
        self.num_turns += 1
        if completion.routed_experts is None:
            self._routes = None
        if self._routes is not None and completion.routed_experts is not None:
            known = sum(map(len, self._routes))
            self._routes.append(completion.routed_experts[known:])

    def trace(self) -> Trace:
        """Return the episode up to the last token that was sampled.

        Raises:
            ValueError: nothing was sampled.
        """
        if not self._answers:
            raise ValueError("transcript: an episode must have a token that was sampled, got none")
        start = len(self._prompt)
        last, answer = self._answers[-1]
        length = last + len(answer.token_ids) - start
        logprobs, mask = np.zeros(length, np.float32), np.zeros(length, bool)
        versions = np.zeros(length, np.int32)
        for place, completion in self._answers:
            where = slice(place - start, place - start + len(completion.token_ids))
            mask[where], logprobs[where] = True, completion.logprobs
            versions[where] = completion.token_policy_versions
            versions[where.stop :] = completion.token_policy_versions[-1]
        return Trace(
            token_ids=self.token_ids[start : start + length],
            loss_mask=mask,
            logprobs=logprobs,
            token_policy_versions=versions,
            routed_experts=None if self._routes is None else np.concatenate(self._routes),
            media_ids=tuple(self._media_ids[: self._num_media]),
        )

    def _take_as_prompt(self, token_ids: np.ndarray) -> None:
        self._prompt = token_ids
        self._parts = [token_ids]
        self._num_media = len(self._media_ids)
