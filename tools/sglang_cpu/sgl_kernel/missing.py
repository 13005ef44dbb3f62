"""A function that says that a kernel is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def missing(name: str) -> Callable[..., NoReturn]:
    """Return what stands for kernel `name`."""

    def call(*_arguments, **_options) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: needs a GPU, got the stand-in of tools/sglang_cpu")

    call.__name__ = name
    return call
