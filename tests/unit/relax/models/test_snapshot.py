"""Snapshots: whole or absent, and proven to be what was written."""

from __future__ import annotations

import json

import pytest
import torch

from relax.models.errors import SnapshotError, SnapshotNotFoundError
from relax.models.snapshot import describe_snapshot, read_snapshot, write_snapshot

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b.bias": torch.ones(4, dtype=torch.bfloat16)}


def test_snapshot_round_trip(tmp_path):
    """What is written is what is read, and the version comes along."""
    directory = write_snapshot(tmp_path / "weights" / "v7", TENSORS, 7)
    version, tensors = read_snapshot(directory)
    assert version == 7
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert describe_snapshot(directory)["num_tensors"] == 2


def test_snapshot_leaves_only_the_final_directory(tmp_path):
    """No partial directory remains, and non-contiguous views are written as they look."""
    view = torch.arange(8.0).view(2, 4)[:, ::2]
    write_snapshot(tmp_path / "v1", {"x": view}, 1, durable=False)
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]
    assert torch.equal(read_snapshot(tmp_path / "v1")[1]["x"], view)


def test_snapshot_refuses_a_second_write(tmp_path):
    """A version is published once."""
    write_snapshot(tmp_path / "v1", TENSORS, 1)
    with pytest.raises(SnapshotError, match="must not exist yet; publish each version once"):
        write_snapshot(tmp_path / "v1", TENSORS, 1)


def test_snapshot_refuses_no_tensors(tmp_path):
    """An empty snapshot is a mistake of the caller."""
    with pytest.raises(SnapshotError, match="at least one tensor"):
        write_snapshot(tmp_path / "v1", {}, 1)


def test_snapshot_detects_altered_bytes(tmp_path):
    """One flipped bit is found before a tensor is used."""
    path = write_snapshot(tmp_path / "v1", TENSORS, 1) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        SnapshotError, match=r"must have checksum xxh3_128:.*, got xxh3_128:.*altered or torn"
    ):
        read_snapshot(tmp_path / "v1")


def test_snapshot_detects_an_empty_file(tmp_path):
    """An empty weights file is named as such."""
    (write_snapshot(tmp_path / "v1", TENSORS, 1) / "model.safetensors").write_bytes(b"")
    with pytest.raises(SnapshotError, match="must not be empty"):
        read_snapshot(tmp_path / "v1")


def test_snapshot_names_missing_parts(tmp_path):
    """A missing snapshot is a FileNotFoundError too; a description without a key is named."""
    with pytest.raises(SnapshotNotFoundError, match=r"snapshot\.json must exist") as caught:
        read_snapshot(tmp_path / "none")
    assert isinstance(caught.value, FileNotFoundError)
    description = write_snapshot(tmp_path / "v1", TENSORS, 1) / "snapshot.json"
    description.write_text(json.dumps({"policy_version": 1}))
    with pytest.raises(SnapshotError, match=r"lacks \['checksum', 'num_tensors'\]"):
        read_snapshot(tmp_path / "v1")
    description.write_text("{")
    with pytest.raises(SnapshotError, match="must be JSON"):
        read_snapshot(tmp_path / "v1")
