"""Finds environments and programs by `package.module:name`, and checks that they can be what they are named as."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from relax.agents.config import AgentConfig
from relax.agents.environment import EnvironmentMaker
from relax.errors import WiringError


def load_environment(name: str, options: Mapping[str, Any]) -> EnvironmentMaker:
    """Return what makes an environment of that name with these options.

    Raises:
        WiringError: there is no such thing, it lacks `reset` or `step`, or it does not take these options.
    """
    where = "rollout.agent.environment"
    made = load_thing(where, name)
    if inspect.isclass(made):
        missing = [method for method in ("reset", "step") if not callable(getattr(made, method, None))]
        if missing:
            raise WiringError(f"{where}: {name!r} must have methods reset and step, lacks {missing}")
    _check_options(where, made, 0, options)
    return partial(made, **options)


def load_program(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the program of that name.

    Raises:
        WiringError: there is no such thing, or it does not take a base URL, a task and these options.
    """
    where = "rollout.agent.program"
    found = load_thing(where, name)
    _check_options(where, found, 2, options)
    return found


def check_agent(config: AgentConfig) -> None:
    """Check before a run that its environment or program can be loaded.

    Raises:
        WiringError: it cannot; the message says why.
    """
    if config.environment is not None:
        load_environment(config.environment, config.options)
    if config.program is not None:
        load_program(config.program, config.options)


def load_thing(where: str, name: str) -> Callable[..., Any]:
    """Import `package.module:name` and return what it names, which can be called."""
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise WiringError(f"{where}: must be 'package.module:name', got {name!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise WiringError(f"{where}: module of {name!r} must be importable, got {error}") from error
    thing = getattr(module, attribute, None)
    if not callable(thing):
        choices = sorted(
            key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
        )
        raise WiringError(f"{where}: {name!r} must be something to call, {module_name} has {choices}")
    return thing


def _check_options(where: str, target: Callable[..., Any], skip: int, options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # written in C: calling it will show
        return
    try:
        signature.bind(*[None] * skip, **options)
    except TypeError as error:
        known = list(signature.parameters)[skip:]
        raise WiringError(f"{where}: options must be of {known}, got {sorted(options)} ({error})") from error
