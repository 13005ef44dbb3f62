"""Rewards: plug-ins that turn a completion into a number. A reward that fails marks its row, never the run.

A plug-in is a function `f(RewardInput) -> float | RewardResult`, named as `package.module:function`.
"""

from __future__ import annotations

import importlib
import math
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from relax.errors import WiringError


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    """What a reward may look at."""

    prompt_text: str
    completion_text: str
    """Special tokens left out."""
    reference_answer: str
    finish_reason: str = "stop"
    """stop, length or abort."""
    modality: str = ""
    num_completion_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """A finite reward, or the reason why there is none (then `reward` is 0 and must not be used)."""

    reward: float
    error: str = ""


Reward = Callable[[RewardInput], RewardResult]
"""What `load_reward` returns: it never raises an Exception."""

RewardFunction = Callable[[RewardInput], "float | RewardResult"]


def exact_match(sample: RewardInput) -> float:
    """Return 1 when the answer is the reference answer and ended by itself, else 0.

    Both are compared after Unicode NFKC, case folding, and joining of runs of white space.
    """
    if sample.finish_reason != "stop":
        return 0.0
    return float(_normalised(sample.completion_text) == _normalised(sample.reference_answer))


REWARDS: dict[str, RewardFunction] = {"exact_match": exact_match}


def load_reward(name: str) -> Reward:
    """Return a reward of ours by name or a plug-in by `package.module:function`, guarded (see `Reward`).

    Raises:
        WiringError: There is no such name, module or function, or it cannot be called.
    """
    return _Guarded(name, REWARDS[name] if name in REWARDS else _import(name))


@dataclass(frozen=True)
class _Guarded:
    name: str
    function: RewardFunction

    def __call__(self, sample: RewardInput) -> RewardResult:
        # The boundary to foreign code: whatever it raises becomes this row's error.
        try:
            result = self.function(sample)
            if isinstance(result, RewardResult):
                if result.error:
                    return result
                result = result.reward
            reward = float(result)
        except Exception as error:
            return RewardResult(reward=0.0, error=f"{self.name}: {type(error).__name__}: {error}")
        if not math.isfinite(reward):
            return RewardResult(reward=0.0, error=f"{self.name}: the reward must be finite, got {reward}")
        return RewardResult(reward=reward)


def _import(name: str) -> RewardFunction:
    module_name, separator, function_name = name.partition(":")
    if not separator or not module_name or not function_name:
        raise WiringError(
            f"reward: must be one of {sorted(REWARDS)} or 'package.module:function', got {name!r}"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise WiringError(f"reward: module of {name!r} must be importable, got {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        choices = sorted(
            key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
        )
        raise WiringError(f"reward: {name!r} must name a function, {module_name} has {choices}")
    return function


def _normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
