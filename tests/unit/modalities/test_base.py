"""Limits, and what the package costs to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from modalities.base import MediaLimits

MODULES = (
    "modalities",
    "modalities.conformance",
    "modalities.audio",
    "modalities.video",
    "relax.data.prompts",
)


def test_media_limits_refuse_nonsense() -> None:
    """A limit of nothing would refuse every file."""
    with pytest.raises(ValueError, match=r"^modalities.limits: max_pixels must be positive, got 0$"):
        MediaLimits(max_pixels=0)


def test_modalities_import_neither_torch_nor_transformers_nor_librosa() -> None:
    """Services that encode media start in a second."""
    code = (
        f"import sys, {', '.join(MODULES)}\n"
        "print(sorted({'torch', 'transformers', 'librosa', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
