"""Which rewards there are: ours by name, those of installed packages, and yours as `package.module:thing`.

An installed package offers one by the entry point group `relax.rewards`. A thing is a function, called with the
sample and the options, or a class, made with the options and called with the sample. It is imported when it is loaded.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, get_args

import msgspec

from relax.errors import WiringError
from relax.rewards.base import Place, Reward, RewardInput, RewardResult
from relax.rewards.config import RewardPart

ENTRY_POINT_GROUP = "relax.rewards"
BUILT_IN = {
    "code": "relax.rewards.code:Code",
    "exact_match": "relax.rewards.exact_match:ExactMatch",
    "format": "relax.rewards.format:Format",
    "fuzzy_match": "relax.rewards.fuzzy_match:FuzzyMatch",
    "generative": "relax.rewards.generative:Generative",
    "http": "relax.rewards.remote:Remote",
    "math": "relax.rewards.math_equivalence:MathEquivalence",
    "multiple_choice": "relax.rewards.multiple_choice:MultipleChoice",
}


def reward_paths() -> dict[str, str]:
    """Return `package.module:thing` of each reward that has a name; ours cannot be replaced."""
    found = {point.name: f"{point.module}:{point.attr}" for point in entry_points(group=ENTRY_POINT_GROUP)}
    return {**found, **BUILT_IN}


def load_reward(part: RewardPart) -> Reward:
    """Return the reward that `part` names, with its options.

    Raises:
        WiringError: There is no such name, module or thing, or it does not take these options.
    """
    thing = _find(part.name)
    if inspect.isclass(thing):
        made = _made(part, thing)
        if not isinstance(made, Reward):
            return _Function(made, {})
        if made.place not in get_args(Place):
            raise WiringError(
                f"reward: place of {part.name!r} must be one of {get_args(Place)}, got {made.place!r}"
            )
        return made
    if not callable(thing):
        raise WiringError(f"reward: {part.name!r} must be a function or a class, got {thing!r}")
    _bind(part, thing, skip=1)
    return _Function(thing, part.options)


class _Function(Reward):
    """A plain function, or an object that can be called, of the user's."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function = function
        self._options = options

    def __call__(self, sample: RewardInput) -> float | RewardResult:
        return self._function(sample, **self._options)


def _find(name: str) -> Any:
    paths = reward_paths()
    module_name, separator, attribute = paths.get(name, name).partition(":")
    if not separator or not module_name or not attribute:
        raise WiringError(
            f"reward: must be one of {sorted(paths)} or 'package.module:function', got {name!r}"
            f"{_nearest(name, list(paths))}"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise WiringError(f"reward: module of {name!r} must be importable, got {error}") from error
    thing = getattr(module, attribute, None)
    if thing is None:
        choices = sorted(
            key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
        )
        raise WiringError(f"reward: {name!r} must name a function, {module_name} has {choices}")
    return thing


def _made(part: RewardPart, cls: type) -> Any:
    """Return `cls` made with the options, their types checked if it is a dataclass."""
    _bind(part, cls, skip=0)
    try:
        if dataclasses.is_dataclass(cls):
            return msgspec.convert(part.options, cls)
        return cls(**part.options)
    except (msgspec.ValidationError, ValueError) as error:
        raise WiringError(f"reward: options of {part.name!r}: {error}") from error


def _bind(part: RewardPart, target: Callable[..., Any], *, skip: int) -> None:
    """Check that `target` takes the options, after `skip` positional arguments."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # written in C: calling it will show
        return
    try:
        signature.bind(*[None] * skip, **part.options)
    except TypeError as error:
        known = list(signature.parameters)[skip:]
        unknown = [key for key in part.options if key not in known]
        got = f"{unknown}{_nearest(unknown[0], known)}" if unknown else f"{sorted(part.options)} ({error})"
        raise WiringError(f"reward: options of {part.name!r} must be of {known}, got {got}") from error


def _nearest(word: str, choices: list[str]) -> str:
    close = difflib.get_close_matches(word, choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
