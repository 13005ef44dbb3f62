"""Runs many episodes at once on one engine: a turn of all of them, then a step of all their environments, and so on.

    reset -> [ generate a turn for every live episode -> step -> observations appended ] until all have ended

A turn is a prompt to the engine like any other: the whole history as token ids, and its media. Episodes with the same
history, such as those of a group before its first turn, are samples of one request. The limits of turns, tokens and
time end an episode, and so does a turn that does not end by itself or names media; such a turn is not shown to
the environment.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from modalities.errors import MediaError
from relax.agents.calls import BoundedCalls
from relax.agents.config import AgentConfig
from relax.agents.environment import EnvironmentMaker, Medium, Observation, Step
from relax.agents.episode import Episode, Sampling, Start
from relax.agents.turns import TurnEncoder
from relax.data.chat import ChatError
from relax.rollout.engine import Completion, GenerateRequest, RolloutEngine


class EpisodeDriver:
    """Drives episodes of one kind of environment. For one thread.

    Args:
        engine: Samples turns.
        environment: Makes the environment of an episode.
        turns: Encodes observations.
        config: The limits.
        now: Seconds.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        environment: EnvironmentMaker,
        turns: TurnEncoder,
        config: AgentConfig,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._environment = environment
        self._turns = turns
        self._config = config
        self._now = now
        self._calls = BoundedCalls(config.max_parallel, config.call_limit_s)

    def run(
        self, starts: Sequence[Start], sampling: Sampling, *, beat: Callable[[], None] = lambda: None
    ) -> list[Episode]:
        """Return the episodes, all at their ends, in order. Blocks; calls `beat` after each turn.

        An environment that raises or is too slow costs its own episode alone.
        """
        episodes = [Episode(start) for start in starts]
        deadline = self._now() + self._config.episode_limit_s
        self._reset(episodes)
        while live := [episode for episode in episodes if episode.is_live]:
            self._take_turns(live, sampling)
            self._step([episode for episode in live if episode.is_live])
            beat()
            if self._now() > deadline:
                for episode in episodes:
                    if episode.is_live:
                        episode.fail(
                            f"episode must end within {self._config.episode_limit_s:g} s, got no end"
                        )
        self._close(episodes)
        return episodes

    def _reset(self, episodes: Sequence[Episode]) -> None:
        def begin(episode: Episode) -> Observation:
            episode.world = self._environment()
            return episode.world.reset(episode.start.task)

        answers = self._calls.run([partial(begin, each) for each in episodes])
        for episode, answer in zip(episodes, answers, strict=True):
            problem = answer.error or _not_observation(answer.value)
            if problem:
                episode.fail(f"environment: reset: {problem}")
            elif not answer.value.is_empty:
                self._ask(episode, answer.value)

    def _ask(self, episode: Episode, observation: Observation) -> None:
        """Append what `reset` showed to the prompt."""
        try:
            prompt = self._turns.without_beginning(episode.transcript.token_ids)
            turn = self._turns.asked(observation)
        except (ChatError, MediaError) as error:
            episode.fail(f"environment: observation: {error}")
            return
        episode.transcript.replace_prompt(prompt)
        episode.transcript.observe(turn.token_ids, turn.items)

    def _take_turns(self, episodes: Sequence[Episode], sampling: Sampling) -> None:
        """Sample a turn for each episode that has room for one; end the others."""
        for episode in episodes:
            if (
                episode.transcript.num_turns >= self._config.max_turns
                or episode.transcript.num_tokens >= self._config.max_episode_tokens
            ):
                episode.end("length")
        alike = by_history([episode for episode in episodes if episode.is_live])
        if not alike:
            return
        requests = [self.request(group, sampling) for group in alike]
        completions = iter(self._engine.generate(requests))
        for request, group in zip(requests, alike, strict=True):
            first = next(completions)
            answers = [first] if first.finish_reason == "refused" else [first, *_next(completions, request)]
            for number, episode in enumerate(group):
                self.take(episode, answers[min(number, len(answers) - 1)])

    def request(self, alike: Sequence[Episode], sampling: Sampling) -> GenerateRequest:
        """Return the request for the next turn of episodes that have the same history."""
        transcript, start = alike[0].transcript, alike[0].start
        token_ids = transcript.token_ids
        name = f"{sampling.seed}/{start.uid}/{start.sample_index}/{transcript.num_turns}"
        return GenerateRequest(
            uid=f"{start.uid}/{start.sample_index}",
            token_ids=token_ids,
            media=transcript.media,
            num_samples=len(alike),
            seed=zlib.crc32(name.encode()),
            max_new_tokens=min(sampling.max_new_tokens, self._config.max_episode_tokens - len(token_ids)),
            temperature=sampling.temperature,
            greedy=sampling.greedy,
        )

    def take(self, episode: Episode, completion: Completion) -> None:
        """Append a turn; one that cannot be gone on from ends the episode."""
        if completion.error:
            episode.refusal = completion.error
            episode.end("abort")
            return
        episode.transcript.answer(completion)
        if completion.finish_reason == "abort":
            episode.end("abort")
            return
        episode.texts.append(completion.text)
        if completion.finish_reason == "length" or self._turns.names_media(completion.token_ids):
            episode.end("length")

    def _step(self, episodes: Sequence[Episode]) -> None:
        calls = [partial(episode.world.step, episode.texts[-1]) for episode in episodes]
        for episode, answer in zip(episodes, self._calls.run(calls), strict=True):
            problem = answer.error or _problem(answer.value)
            if problem:
                episode.fail(f"environment: step: {problem}")
                continue
            step: Step = answer.value
            episode.reward += float(step.reward)
            episode.info |= {name: float(value) for name, value in step.info.items()}
            if step.done:
                episode.end("stop")
            else:
                self._observe(episode, step.observation)

    def _observe(self, episode: Episode, observation: Observation) -> None:
        try:
            turn = self._turns.following(observation)
        except (ChatError, MediaError) as error:
            episode.fail(f"environment: observation: {error}")
            return
        turn = self._turns.after_answer(episode.transcript.last_token, turn)
        if episode.transcript.num_tokens + len(turn.token_ids) >= self._config.max_episode_tokens:
            episode.end("length")
        else:
            episode.transcript.observe(turn.token_ids, turn.items)

    def _close(self, episodes: Sequence[Episode]) -> None:
        worlds = [episode.world for episode in episodes if callable(getattr(episode.world, "close", None))]
        self._calls.run([world.close for world in worlds])


def by_history(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """Return the episodes by task and history, in order."""
    alike: dict[tuple, list[Episode]] = {}
    for episode in episodes:
        transcript = episode.transcript
        key = (episode.start.uid, transcript.token_ids.tobytes(), transcript.media_ids)
        alike.setdefault(key, []).append(episode)
    return list(alike.values())


def _next(completions: Any, request: GenerateRequest) -> list[Completion]:
    return [next(completions) for _ in range(request.num_samples - 1)]


def _problem(step: Any) -> str:
    """Return why what `step` returned cannot be used, or ''."""
    if not isinstance(step, Step):
        return f"must return a Step, got {step!r}"
    for name, value in {"reward": step.reward, **step.info}.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            return f"{name} must be a finite number, got {value!r}"
    return _not_observation(step.observation)


def _not_observation(shown: Any) -> str:
    """Return why something is not an observation, or ''."""
    if not isinstance(shown, Observation):
        return f"must return an Observation, got {shown!r}"
    strange = [
        medium
        for medium in shown.media
        if not isinstance(medium, Medium) or not isinstance(medium.data, bytes)
    ]
    if not isinstance(shown.text, str) or not isinstance(shown.role, str) or strange:
        return "an Observation must hold text and media as bytes, got other types"
    return ""
