"""A weight snapshot: one policy version's tensors in a directory that appears whole or not at all.

Layout: `<dir>/model.safetensors` (names of the model directory) and `<dir>/snapshot.json`
{policy_version, num_tensors, checksum}. It is not a checkpoint: no optimizer, no tokenizer, no configuration.
Written beside its final name, flushed, then renamed, so that a reader never sees half of one.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file, save_file

from relax.durable import flush
from relax.models.errors import SnapshotError, SnapshotNotFoundError

TENSORS_FILE = "model.safetensors"
DESCRIPTION_FILE = "snapshot.json"


def write_snapshot(
    directory: Path | str, tensors: Mapping[str, torch.Tensor], policy_version: int, *, durable: bool = True
) -> Path:
    """Write one policy version and return its directory. The tensors are read, not kept.

    Args:
        directory: Must not exist yet; its parent is made when missing.
        tensors: Names as in the model directory's safetensors files.
        policy_version: The version that these weights are.
        durable: Flush to the disk before the rename. False for snapshots that need not survive a power cut.

    Raises:
        SnapshotError: The directory exists already, or there is no tensor to write.
    """
    target = Path(directory)
    if target.exists():
        raise SnapshotError(f"write_snapshot: {target} must not exist yet; publish each version once")
    if not tensors:
        raise SnapshotError(f"write_snapshot: {target} must get at least one tensor, got none")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(plain, partial / TENSORS_FILE, metadata={"format": "pt"})
        description = {
            "policy_version": int(policy_version),
            "num_tensors": len(plain),
            "checksum": file_checksum(partial / TENSORS_FILE),
        }
        (partial / DESCRIPTION_FILE).write_text(json.dumps(description, indent=1) + "\n")
        if durable:
            for path in (partial / TENSORS_FILE, partial / DESCRIPTION_FILE, partial):
                flush(path)
        partial.rename(target)
        if durable:
            flush(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def read_snapshot(directory: Path | str) -> tuple[int, dict[str, torch.Tensor]]:
    """Return (policy_version, tensors on the CPU) once the bytes on disk are proven to be those written.

    Raises:
        SnapshotNotFoundError: A file is missing.
        SnapshotError: A file is unreadable.
        SnapshotError: The bytes do not have the checksum that was written with them.
        SnapshotError: The number of tensors differs from the description's.
    """
    where = Path(directory)
    description = describe_snapshot(where)
    actual = _checksum_or_error(where)
    if actual != description["checksum"]:
        raise SnapshotError(
            f"read_snapshot: {where / TENSORS_FILE} must have checksum {description['checksum']}, "
            f"got {actual}; the file was altered or torn, publish the version again"
        )
    tensors = load_file(where / TENSORS_FILE)
    if len(tensors) != description["num_tensors"]:
        raise SnapshotError(
            f"read_snapshot: {where} must hold {description['num_tensors']} tensors, got {len(tensors)}"
        )
    return int(description["policy_version"]), tensors


def describe_snapshot(directory: Path | str) -> dict[str, Any]:
    """Return the description (policy_version, num_tensors, checksum) without reading the tensors.

    Raises:
        SnapshotNotFoundError: There is no description.
        SnapshotError: The description is not JSON or lacks a key.
    """
    path = Path(directory) / DESCRIPTION_FILE
    try:
        description = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise SnapshotNotFoundError(f"read_snapshot: {path} must exist") from error
    except OSError as error:
        raise SnapshotError(f"read_snapshot: {path} must be readable, got {error.strerror}") from error
    except ValueError as error:
        raise SnapshotError(f"read_snapshot: {path} must be JSON, got {error}") from error
    keys = {"policy_version", "num_tensors", "checksum"}
    missing = keys - set(description) if isinstance(description, dict) else keys
    if missing:
        raise SnapshotError(f"read_snapshot: {path} must have {sorted(keys)}, lacks {sorted(missing)}")
    return description


def file_checksum(path: Path) -> str:
    """Return `xxh3_128:<hex>` of a file's bytes, read through a memory map. The file must not be empty."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return f"xxh3_128:{xxhash.xxh3_128_hexdigest(view)}"


def _checksum_or_error(where: Path) -> str:
    path = where / TENSORS_FILE
    try:
        return file_checksum(path)
    except FileNotFoundError as error:
        raise SnapshotNotFoundError(f"read_snapshot: {path} must exist") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise SnapshotError(f"read_snapshot: {path} must not be empty") from error
