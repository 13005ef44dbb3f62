"""Which modalities there are: ours, those of installed packages, and those named in the configuration.

An installed package offers a class by the entry point group `relax.modalities`; a configuration names one as
`package.module:Class`. A class is imported when it is loaded, not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.metadata import entry_points

from modalities.base import EncodingProfile, MediaLimits, Modality
from modalities.errors import ModalityError
from modalities.profile import TOWERS

ENTRY_POINT_GROUP = "relax.modalities"
BUILT_IN = ("modalities.image:Image", "modalities.audio:Audio", "modalities.video:Video")


def load_modalities(
    profile: EncodingProfile, limits: MediaLimits, extra: Sequence[str] = ()
) -> dict[str, Modality]:
    """Return every modality by name, ours first.

    Args:
        profile: What the model's processor does.
        limits: What a file may cost.
        extra: Classes as `package.module:Class`, beside ours and those found by entry point.

    Raises:
        ModalityError: a class cannot be imported or is wrong, or two share a name, placeholder or column.
    """
    found = [f"{point.module}:{point.attr}" for point in entry_points(group=ENTRY_POINT_GROUP)]
    modalities: dict[str, Modality] = {}
    for path in dict.fromkeys((*BUILT_IN, *sorted(found), *extra)):
        modality = load_class(path)(profile, limits)
        _check_distinct(path, modality, modalities)
        modalities[modality.name] = modality
    return modalities


def load_class(path: str) -> type[Modality]:
    """Import `package.module:Class` and check what can be seen of it.

    Raises:
        ModalityError: it cannot be imported, is no Modality, or lacks one of `name`, `placeholder`, `tower`.
    """
    module_name, colon, class_name = path.partition(":")
    if not (module_name and colon and class_name):
        raise ModalityError(
            "must be package.module:Class, got no such form; for example my_pkg.depth:Depth", path
        )
    try:
        loaded = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ModalityError(f"must be importable, got {type(error).__name__}: {error}", path) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Modality)):
        raise ModalityError(f"must be a subclass of modalities.base.Modality, got {loaded!r}", path)
    for problem in class_problems(loaded):
        raise ModalityError(problem, path)
    return loaded


def class_problems(loaded: type[Modality]) -> list[str]:
    """Return what is wrong with the class itself; empty when nothing is."""
    problems = []
    name, placeholder, tower = (getattr(loaded, key, None) for key in ("name", "placeholder", "tower"))
    if not (isinstance(name, str) and name.isidentifier()) or name == "text":
        problems.append(f"name must be an identifier other than 'text', got {name!r}")
    if not (
        isinstance(placeholder, str) and len(placeholder) > 2 and placeholder[0] + placeholder[-1] == "<>"
    ):
        problems.append(f"placeholder must be like '<{name}>', got {placeholder!r}")
    if tower not in TOWERS:
        problems.append(f"tower must be one of {TOWERS}, got {tower!r}")
    if missing := sorted(getattr(loaded, "__abstractmethods__", ())):
        problems.append(f"methods {missing} must be implemented, got none")
    return problems


def _check_distinct(path: str, modality: Modality, others: dict[str, Modality]) -> None:
    for other in others.values():
        for what in ("name", "placeholder"):
            if getattr(other, what) == getattr(modality, what):
                taken = type(other).__module__ + ":" + type(other).__qualname__
                raise ModalityError(
                    f"{what} must be its own, got {getattr(modality, what)!r}, which {taken} has", path
                )
        shared = {column.name for column in other.columns()} & {column.name for column in modality.columns()}
        if shared:
            raise ModalityError(
                f"columns must be its own, got {sorted(shared)}, which {other.name} has", path
            )
