"""One attempt at one reward: whatever the plug-in returns or raises becomes an `Outcome`. Also the pauses between two.

The one boundary to foreign code, the same inline, in threads and in worker processes.
"""

from __future__ import annotations

import random

import msgspec

from relax.rewards.base import BoundedReward, Reward, RewardFailedError, RewardInput, RewardResult

MAX_REASON_CHARS = 500
LARGEST = 3.4e38
"""Rewards travel as 32-bit floats."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended: a finite reward, or why there is none and whether to try again."""

    reward: float = 0.0
    error: str = ""
    retry: bool = False


def attempt(reward: Reward, sample: RewardInput, time_limit_s: float) -> Outcome:
    """Call the reward once; raises nothing but KeyboardInterrupt. The time limit is the reward's own to keep."""
    try:
        bounded = reward.bounded if isinstance(reward, BoundedReward) else None
        result = bounded(sample, time_limit_s) if bounded else reward(sample)
        if isinstance(result, RewardResult):
            if result.error:
                return failed(result.error, retry=not reward.deterministic)
            result = result.reward
        value = float(result)
    except MemoryError as error:
        if reward.reward_at_limit is not None:
            return Outcome(reward=reward.reward_at_limit)
        return failed(f"MemoryError: {error}", retry=not reward.deterministic)
    except RewardFailedError as error:
        return failed(str(error), retry=error.retry and not reward.deterministic)
    except (Exception, SystemExit) as error:  # a plug-in's sys.exit() is a failure too
        return failed(f"{type(error).__name__}: {error}", retry=not reward.deterministic)
    if not abs(value) <= LARGEST:
        return failed(f"the reward must be finite in 32 bits, got {value}", retry=not reward.deterministic)
    return Outcome(reward=value)


def failed(reason: str, *, retry: bool) -> Outcome:
    """Return the outcome of a failure, its reason on one line of bounded length."""
    line = " ".join(reason.split())
    return Outcome(
        error=line if len(line) <= MAX_REASON_CHARS else f"{line[:MAX_REASON_CHARS]}…", retry=retry
    )


def pause_s(number: int, chance: random.Random) -> float:
    """Return the seconds to wait before retry `number`, from 1: evenly spread up to the longest."""
    return chance.uniform(0.0, longest_pause_s(number))


def longest_pause_s(number: int) -> float:
    """Return the bound of the pause before retry `number`: it doubles from one to the next."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (number - 1))
