"""The submodule that SGLang's state-space layers import from."""

from __future__ import annotations

from sgl_kernel.missing import missing


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(name)
