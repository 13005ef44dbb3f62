"""A weight snapshot: one policy version's tensors in a directory that appears whole or not at all.

Layout, in names of the model directory:

    model.safetensors, or model-00001-of-00003.safetensors ... and model.safetensors.index.json as Hugging Face has it
    snapshot.json   {policy_version, num_tensors, files: {name: checksum}}

It is not a checkpoint: no optimizer, no tokenizer, no configuration. Written beside its final name, then renamed, so
that a reader never sees half of one. A file that is the same in the snapshot before is not written again: it is a hard
link, which lives on when that snapshot is deleted. Readers go by checksums and copy only what they do not have.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from relax.durable import flush, flush_tree
from relax.models.checkpoint_files import INDEX_FILE, ONE_FILE, write_index
from relax.models.errors import SnapshotError, SnapshotNotFoundError
from relax.models.tensor_file import file_bytes

DESCRIPTION_FILE = "snapshot.json"
_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """One file of a snapshot that is to be written.

    name: as `file_names` returns it. tensors: names of what is in it. content: its bytes, uint8 [num_bytes];
    None: the file is as in the snapshot before.
    """

    name: str
    tensors: tuple[str, ...] = ()
    content: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Written:
    """A whole snapshot, as its writer remembers it for the next one.

    checksums and tensors: of each file, by its name. num_bytes: of all files; num_bytes_new: of those that the snapshot
    before did not have.
    """

    directory: Path
    checksums: Mapping[str, str]
    tensors: Mapping[str, tuple[str, ...]]
    num_bytes: int
    num_bytes_new: int


@dataclass
class SnapshotWriter:
    """One snapshot in the making; use it in a `with` block, in which `finish` is called last.

    directory: must not exist yet; its parent is made when missing.
    before: the snapshot whose files are referred to where they are the same; None: there is none.
    durable: flush to the disk before the rename. False for snapshots that need not survive a power cut.
    """

    directory: Path
    policy_version: int
    before: Written | None = None
    durable: bool = False
    _checksums: dict[str, str] = field(default_factory=dict)
    _tensors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _num_bytes: int = 0
    _num_bytes_new: int = 0

    def __enter__(self) -> Self:
        """Make the directory to write in.

        Raises:
            SnapshotError: the snapshot exists already.
        """
        if self.directory.exists():
            raise SnapshotError(
                f"write_snapshot: {self.directory} must not exist yet; publish each version once"
            )
        self._partial = self.directory.parent / f".{self.directory.name}.{os.getpid()}.partial"
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, file: WeightFile) -> None:
        """Write a file, or refer to the one before if that is the same."""
        if file.content is None:
            self._keep(file.name)
            return
        content = file.content.numpy().data
        checksum = f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}"
        path = self._partial / file.name
        if self.before is None or self.before.checksums.get(file.name) != checksum:
            with path.open("wb") as stream:
                stream.write(content)
            self._num_bytes_new += content.nbytes
        else:
            _link(self.before.directory / file.name, path)
        self._checksums[file.name], self._tensors[file.name] = checksum, file.tensors
        self._num_bytes += content.nbytes

    def finish(self) -> Written:
        """Give the snapshot its final name: from here on it is whole.

        Raises:
            SnapshotError: it has no tensor.
        """
        names = {name: file for file in sorted(self._tensors) for name in self._tensors[file]}
        if not names:
            raise SnapshotError(f"write_snapshot: {self.directory} must get at least one tensor, got none")
        if len(self._checksums) > 1:
            write_index(self._partial, names, self._num_bytes)
        description = {
            "policy_version": int(self.policy_version),
            "num_tensors": len(names),
            "files": self._checksums,
        }
        (self._partial / DESCRIPTION_FILE).write_text(json.dumps(description, indent=1) + "\n")
        if self.durable:
            flush_tree(self._partial)
        self._partial.rename(self.directory)
        if self.durable:
            flush(self.directory.parent)
        return Written(
            directory=self.directory,
            checksums=self._checksums,
            tensors=self._tensors,
            num_bytes=self._num_bytes,
            num_bytes_new=self._num_bytes_new,
        )

    def _keep(self, name: str) -> None:
        if self.before is None or name not in self.before.checksums:
            raise SnapshotError(
                f"write_snapshot: {name} must be in the snapshot before {self.directory}, got none there"
            )
        path = self._partial / name
        _link(self.before.directory / name, path)
        self._checksums[name] = self.before.checksums[name]
        self._tensors[name] = self.before.tensors[name]
        self._num_bytes += path.stat().st_size


def write_snapshot(
    directory: Path | str, tensors: Mapping[str, torch.Tensor], policy_version: int, *, durable: bool = True
) -> Path:
    """Write one policy version in one file and return its directory. The tensors are read, not kept.

    Raises:
        SnapshotError: The directory exists already, or there is no tensor to write.
    """
    with SnapshotWriter(Path(directory), policy_version, durable=durable) as writer:
        if tensors:
            writer.add(WeightFile(name=ONE_FILE, tensors=tuple(tensors), content=file_bytes(tensors)))
        return writer.finish().directory


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a reader got: the version, the tensors of files that it did not have, and all files' checksums.

    tensors: on the CPU, mapped from the files: copied when they are used.
    names: of the tensors in each of the files that were read, by the file's checksum.
    """

    policy_version: int
    tensors: dict[str, torch.Tensor]
    checksums: frozenset[str]
    names: dict[str, frozenset[str]]


def read_snapshot(directory: Path | str) -> tuple[int, dict[str, torch.Tensor]]:
    """Return (policy_version, tensors on the CPU) once the bytes on disk are proven to be those written.

    Raises:
        SnapshotNotFoundError: A file is missing.
        SnapshotError: A file is unreadable.
        SnapshotError: The bytes do not have the checksum that was written with them.
        SnapshotError: The number of tensors differs from the description's.
    """
    snapshot = read_changes(directory)
    return snapshot.policy_version, snapshot.tensors


def read_changes(directory: Path | str, known: Collection[str] = ()) -> Snapshot:
    """Read only what lies in other files than those of the `known` checksums; else as `read_snapshot`."""
    where = Path(directory)
    description = describe_snapshot(where)
    checksums: dict[str, str] = description["files"]
    wanted = {file: checksum for file, checksum in checksums.items() if checksum not in known}
    prove(where, wanted)
    tensors: dict[str, torch.Tensor] = {}
    names = {}
    for file, checksum in wanted.items():
        found = _tensors_of(where / file)
        tensors |= found
        names[checksum] = frozenset(found)
    if len(wanted) == len(checksums) and len(tensors) != description["num_tensors"]:
        raise SnapshotError(
            f"read_snapshot: {where} must hold {description['num_tensors']} tensors, got {len(tensors)}"
        )
    return Snapshot(
        policy_version=int(description["policy_version"]),
        tensors=tensors,
        checksums=frozenset(checksums.values()),
        names=names,
    )


def describe_snapshot(directory: Path | str) -> dict[str, Any]:
    """Return the description (policy_version, num_tensors, files) without reading the tensors.

    Raises:
        SnapshotNotFoundError: There is no description.
        SnapshotError: The description is not JSON, lacks a key or names files that are none of a snapshot's.
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
    keys = {"policy_version", "num_tensors", "files"}
    missing = keys - set(description) if isinstance(description, dict) else keys
    if missing:
        raise SnapshotError(f"read_snapshot: {path} must have {sorted(keys)}, lacks {sorted(missing)}")
    files = description["files"]
    strange = [name for name in files if not _FILE.fullmatch(name)] if isinstance(files, dict) else [files]
    if strange or not files:
        raise SnapshotError(
            f"read_snapshot: {path} must name model*.safetensors and their checksums, got {strange or 'none'}"
        )
    return description


def prove(directory: Path, checksums: Mapping[str, str]) -> None:
    """Check that files have the checksums that their snapshot says.

    Raises:
        SnapshotNotFoundError: A file is missing.
        SnapshotError: A file is empty, or has another checksum.
    """
    for name, expected in checksums.items():
        path = directory / name
        try:
            actual = file_checksum(path)
        except FileNotFoundError as error:
            raise SnapshotNotFoundError(f"read_snapshot: {path} must exist") from error
        except ValueError as error:  # an empty file cannot be mapped
            raise SnapshotError(f"read_snapshot: {path} must not be empty") from error
        if actual != expected:
            raise SnapshotError(
                f"read_snapshot: {path} must have checksum {expected}, got {actual}; the file was altered or torn, "
                "publish the version again"
            )


def file_checksum(path: Path) -> str:
    """Return `xxh3_128:<hex>` of a file's bytes, read through a memory map. The file must not be empty."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return f"xxh3_128:{xxhash.xxh3_128_hexdigest(view)}"


def copy_weights(snapshot: Path, target: Path) -> None:
    """Bring a snapshot's weights and index into another directory, as hard links where the file system allows."""
    copy_files((snapshot / name for name in describe_snapshot(snapshot)["files"]), target)
    if (snapshot / INDEX_FILE).is_file():
        shutil.copyfile(snapshot / INDEX_FILE, target / INDEX_FILE)


def copy_files(sources: Iterable[Path], target: Path) -> None:
    """Link files into a directory, or copy them where that is not possible."""
    for source in sources:
        _link(source, target / source.name)


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _tensors_of(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except SafetensorError as error:
        raise SnapshotError(f"read_snapshot: {path} must be a safetensors file, got {error}") from error
