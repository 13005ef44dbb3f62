"""Tells whether the stand-ins of this directory are needed, and gives way to a real package where they are not."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def needed() -> bool:
    """Whether torch was built for the CPU alone. Reads two constants; touches no device."""
    import torch

    return torch.version.cuda is None and getattr(torch.version, "hip", None) is None


def give_way(name: str) -> None:
    """Put the real package `name` in the place of the stand-in that is being imported."""
    kept = sys.path[:]
    sys.path[:] = [entry for entry in kept if Path(entry or ".").resolve() != HERE]
    sys.modules.pop(name, None)
    try:
        importlib.import_module(name)
    finally:
        sys.path[:] = kept
