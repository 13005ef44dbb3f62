"""Names, types and shapes of the tensors in a directory's safetensors files, from their headers alone. No torch."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from relax.models.errors import CheckpointError

MAX_HEADER_BYTES = 100 << 20
"""Longest header that the safetensors format allows."""


@dataclass(frozen=True)
class TensorLayout:
    """One tensor: safetensors' name of its type, such as `F32`, and its shape."""

    dtype: str
    shape: tuple[int, ...]


def read_layout(directory: Path | str) -> dict[str, TensorLayout]:
    """Return the layout of every tensor, by name.

    Raises:
        CheckpointError: There is no safetensors file, or one has another header.
    """
    where = Path(directory)
    files = sorted(where.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"read_layout: {where} must hold safetensors files, got none")
    return {name: layout for file in files for name, layout in _read_header(file).items()}


def _read_header(path: Path) -> dict[str, TensorLayout]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
        return {
            name: TensorLayout(entry["dtype"], tuple(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        raise CheckpointError(
            f"read_layout: {path} must be a safetensors file, got another header ({error})"
        ) from error
