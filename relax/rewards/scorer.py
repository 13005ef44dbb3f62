"""The reward of completions: every part of the weighted sum at each, in its place, with retries. It knows no tables.

A failure stays with its completion: `Score.error` says which part failed and why, after all attempts.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

from relax.rewards.attempt import LARGEST, Outcome, attempt, failed, longest_pause_s, pause_s
from relax.rewards.base import Reward, RewardInput
from relax.rewards.config import RewardConfig, RewardPart
from relax.rewards.pool import BOUNDED_GRACE_S, START_LIMIT_S, WorkerPool
from relax.rewards.registry import load_reward

Attempt = Callable[[RewardInput], Outcome]


@dataclass(frozen=True, kw_only=True)
class Score:
    """What became of one completion.

    reward: weighted sum of the parts, 0 if one failed. parts: reward of each part by label, None where it failed.
    error: the part that failed and the reason, empty if none did.
    """

    reward: float
    parts: dict[str, float | None] = field(default_factory=dict)
    error: str = ""


class Scorer:
    """Scores completions by the parts of the configuration. One thread may call it.

    Args:
        config: The parts, limits and retries.
        wait_s: How to pause between two attempts; absent: a wait that `close` ends.
        chance: Where pauses get their spread.

    Raises:
        WiringError: a part cannot be loaded.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        wait_s: Callable[[float], object] | None = None,
        chance: random.Random | None = None,
    ) -> None:
        self._config = config
        self._closing = threading.Event()
        self._wait_s = wait_s or self._closing.wait
        self._chance = chance or random.Random()
        rewards = [load_reward(part) for part in config.parts]
        places = [reward.place for reward in rewards]
        isolated = [index for index, place in enumerate(places) if place == "process"]
        self._pool = WorkerPool(
            [config.parts[index] for index in isolated],
            [rewards[index] for index in isolated],
            num_workers=config.workers,
            max_memory_bytes=config.worker_memory_bytes,
        )
        self._lanes = {
            "process": ThreadPoolExecutor(config.workers, thread_name_prefix="reward-process"),
            "thread": ThreadPoolExecutor(config.max_in_flight, thread_name_prefix="reward-thread"),
        }
        self._num_slots = {"process": config.workers, "thread": config.max_in_flight}
        self._places = places
        self._attempts = [
            self._attempt(part, reward, isolated.index(index) if index in isolated else -1)
            for index, (part, reward) in enumerate(zip(config.parts, rewards, strict=True))
        ]

    def score(
        self, samples: Sequence[RewardInput], *, beat: Callable[[], None] | None = None, beat_s: float = 30.0
    ) -> list[Score]:
        """Return a score a sample, in order. Blocks within the limits and calls `beat` every `beat_s` meanwhile."""
        futures: dict[tuple[int, int], Future[Outcome]] = {}
        outcomes: dict[tuple[int, int], Outcome] = {}
        for row, sample in enumerate(samples):
            for index, place in enumerate(self._places):
                if place != "inline":
                    futures[row, index] = self._lanes[place].submit(self._with_retries, index, sample)
        for row, sample in enumerate(samples):
            for index, place in enumerate(self._places):
                if place == "inline":
                    outcomes[row, index] = self._attempts[index](sample)
        self._await(list(futures.values()), self._longest_s(len(samples)), beat, beat_s)
        late = failed("must be scored within the limits of all attempts, got no end", retry=False)
        for key, future in futures.items():
            outcomes[key] = late if future.cancel() or not future.done() else future.result()
        return [
            self._score([outcomes[row, index] for index in range(len(self._places))])
            for row in range(len(samples))
        ]

    def worker_pids(self) -> list[int]:
        """Return the worker processes that are there now."""
        return self._pool.pids()

    def close(self) -> None:
        """End the worker processes; safe to repeat."""
        self._closing.set()
        for lane in self._lanes.values():
            lane.shutdown(wait=False, cancel_futures=True)
        self._pool.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attempt(self, part: RewardPart, reward: Reward, pool_index: int) -> Attempt:
        limit_s = self._config.limit_s(part)
        if pool_index >= 0:
            return lambda sample: self._pool.attempt(pool_index, sample, limit_s)
        return partial(attempt, reward, time_limit_s=limit_s)

    def _with_retries(self, index: int, sample: RewardInput) -> Outcome:
        for number in range(1, self._config.retries + 1):
            outcome = self._attempts[index](sample)
            if not outcome.retry or self._closing.is_set():
                return outcome
            self._wait_s(pause_s(number, self._chance))
        return self._attempts[index](sample)

    def _longest_s(self, num_samples: int) -> float:
        """Return a bound that honest attempts cannot pass: all of them, one after another in each slot, and a start."""
        longest_s = START_LIMIT_S
        for place, num_slots in self._num_slots.items():
            parts = [
                part for part, other in zip(self._config.parts, self._places, strict=True) if other == place
            ]
            one_s = sum(self._config.limit_s(part) + BOUNDED_GRACE_S for part in parts)
            pauses_s = sum(longest_pause_s(number) for number in range(1, self._config.retries + 1))
            rounds = math.ceil(num_samples / num_slots)
            longest_s += rounds * ((self._config.retries + 1) * one_s + pauses_s * len(parts))
        return longest_s

    def _await(
        self,
        futures: Sequence[Future[Outcome]],
        deadline_s: float,
        beat: Callable[[], None] | None,
        beat_s: float,
    ) -> None:
        pending: set[Future[Outcome]] = set(futures)
        while pending and deadline_s > 0:
            _, pending = wait(pending, min(beat_s, deadline_s))
            deadline_s -= beat_s
            if pending and beat is not None:
                beat()

    def _score(self, outcomes: Sequence[Outcome]) -> Score:
        parts: dict[str, float | None] = {}
        errors, total = [], 0.0
        for part, outcome in zip(self._config.parts, outcomes, strict=True):
            parts[part.key] = None if outcome.error else outcome.reward
            if outcome.error:
                errors.append(f"{part.key}: {outcome.error}")
            else:
                total += part.weight * outcome.reward
        if not errors and not abs(total) <= LARGEST:
            errors.append(f"the weighted sum must be finite in 32 bits, got {total}")
        return Score(reward=0.0 if errors else total, parts=parts, error="; ".join(errors))
