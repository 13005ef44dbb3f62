"""Runs agent programs, a process each, and answers what they ask at their endpoints: many at once, on one engine.

    start processes -> [ gather requests -> generate -> answer ] until every program has ended

A program is `function(base_url, task, **options)` and returns a reward, a mapping with `reward` and `info`, or None.
Its process is killed at the episode's time limit; what it raises costs its episode alone.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from relax.agents.chat import Conversation
from relax.agents.config import AgentConfig
from relax.agents.endpoint import Asked, ChatEndpoint
from relax.agents.episode import Episode, Sampling, Start
from relax.agents.program_entry import task_to_json
from relax.agents.turns import TurnEncoder
from relax.rollout.engine import Completion, GenerateRequest, RolloutEngine

GATHER_S = 0.02
"""How long a batch waits for the next request of the programs that are thinking."""
POLL_S = 0.2
BEAT_S = 5.0
END_GRACE_S = 5.0


class ProgramDriver:
    """Drives episodes of a program. For one thread.

    Args:
        engine: Samples answers.
        turns: Encodes messages.
        config: The program and the limits.
    """

    def __init__(self, engine: RolloutEngine, turns: TurnEncoder, config: AgentConfig) -> None:
        self._engine = engine
        self._turns = turns
        self._config = config
        self._endpoint = ChatEndpoint(config.episode_limit_s)

    def run(
        self, starts: Sequence[Start], sampling: Sampling, *, beat: Callable[[], None] = lambda: None
    ) -> list[Episode]:
        """Return the episodes, all at their ends, in order. Blocks; calls `beat` every few seconds."""
        episodes = [Episode(start) for start in starts]
        running: set[_Program] = set()
        waiting = list(reversed(episodes))
        beaten = time.monotonic()
        while waiting or running:
            while waiting and len(running) < self._config.max_parallel:
                running.add(_Program(waiting.pop(), self._turns, self._config, self._endpoint))
            asked = self._gather(len(running))
            if asked:
                self._answer(asked, sampling)
            running = {program for program in running if not program.has_ended()}
            if any(episode.finish_reason == "abort" for episode in episodes):
                self._give_up(running, waiting)
                running, waiting = set(), []
            if time.monotonic() - beaten > BEAT_S:
                beaten = time.monotonic()
                beat()
        return episodes

    def close(self) -> None:
        """End the endpoint."""
        self._endpoint.close()

    def _gather(self, num_running: int) -> list[Asked]:
        """Return the requests that wait: all that there can be, or what came before nobody asked for a moment."""
        asked: list[Asked] = []
        limit_s = POLL_S
        while len(asked) < num_running:
            try:
                asked.append(self._endpoint.asked.get(timeout=limit_s))
            except queue.Empty:
                break
            limit_s = GATHER_S
        return [each for each in asked if each.conversation.episode.is_live]

    def _answer(self, asked: Sequence[Asked], sampling: Sampling) -> None:
        requests = [self._request(each, sampling) for each in asked]
        for each, completion in zip(asked, self._engine.generate(requests), strict=True):
            each.give(self._taken(each, completion))

    def _request(self, asked: Asked, sampling: Sampling) -> GenerateRequest:
        episode, transcript = asked.conversation.episode, asked.conversation.transcript
        token_ids, start = transcript.token_ids, episode.start
        limit = min(sampling.max_new_tokens, self._config.max_episode_tokens - len(token_ids))
        name = f"{sampling.seed}/{start.uid}/{start.sample_index}/{len(episode.texts)}"
        return GenerateRequest(
            uid=f"{start.uid}/{start.sample_index}",
            token_ids=token_ids,
            media=transcript.media,
            seed=zlib.crc32(name.encode()),
            max_new_tokens=min(limit, asked.max_tokens) if asked.max_tokens else limit,
            temperature=sampling.temperature,
            greedy=sampling.greedy,
        )

    def _taken(self, asked: Asked, completion: Completion) -> dict[str, Any] | None:
        episode = asked.conversation.episode
        if completion.error:
            episode.refusal = completion.error
        if completion.error or completion.finish_reason == "abort":
            episode.end("abort")
            return None
        return asked.conversation.answer(completion)

    def _give_up(self, running: set[_Program], waiting: Sequence[Episode]) -> None:
        """Kill all programs; what they had is not answered any more."""
        for program in running:
            program.episode.end("abort")
            program.kill()
        for episode in waiting:
            episode.end("abort")
        with suppress(queue.Empty):
            while True:
                self._endpoint.asked.get_nowait().give(None)


class _Program:
    """The process of one episode; a thread of its own talks to it and waits for its end."""

    def __init__(
        self, episode: Episode, turns: TurnEncoder, config: AgentConfig, endpoint: ChatEndpoint
    ) -> None:
        self.episode = episode
        self._config = config
        self._endpoint = endpoint
        self._base_url = endpoint.open(Conversation(episode, turns, config))
        self._result: dict[str, Any] = {}
        job = {
            "program": config.program,
            "options": config.options,
            "base_url": self._base_url,
            "task": task_to_json(episode.start.task),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "relax.agents.program_entry"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._wait, args=(json.dumps(job).encode(),), daemon=True)
        self._thread.start()

    def has_ended(self) -> bool:
        """Return whether it has, and settle the episode if so."""
        if self._thread.is_alive():
            return False
        self._endpoint.close_session(self._base_url)
        self._settle()
        return True

    def kill(self) -> None:
        """Kill the process and what it started."""
        self._endpoint.close_session(self._base_url)
        self._kill_group()
        self._thread.join(END_GRACE_S)

    def _wait(self, job: bytes) -> None:
        limit_s = self._config.episode_limit_s
        try:
            output, _ = self._process.communicate(job, timeout=limit_s)
            self._result = json.loads(output or b"null") or {"error": f"exit code {self._process.returncode}"}
        except subprocess.TimeoutExpired:
            self._kill_group()
            self._process.communicate()
            self._result = {"error": f"must end within {limit_s:g} s, got no end"}
        except ValueError:
            self._result = {"error": "must write nothing to the standard output that it was started with"}
        self._kill_group()  # what it started and left behind

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _settle(self) -> None:
        episode, error, reward = self.episode, self._result.get("error"), self._result.get("reward")
        if not episode.is_live:
            return
        if error:
            episode.fail(f"program: {error}")
        elif not episode.transcript.num_turns:
            episode.fail("program: must ask the policy at least once, got no request that was answered")
        elif reward is None and self._config.reward == "environment":
            episode.fail("program: must return a reward, or rollout.agent.reward be rewards, got none")
        elif reward is not None and not math.isfinite(reward):
            episode.fail(f"program: reward must be finite, got {reward}")
        else:
            episode.reward = float(reward or 0.0)
            episode.info |= self._result.get("info") or {}
            episode.end("length" if episode.cut else "stop")
