"""Snapshots: whole or absent, and proven to be what was written."""

from __future__ import annotations

import json

import pytest
import torch

from relax.models.checkpoint_files import file_names
from relax.models.errors import SnapshotError, SnapshotNotFoundError
from relax.models.snapshot import (
    SnapshotWriter,
    WeightFile,
    copy_weights,
    describe_snapshot,
    read_changes,
    read_snapshot,
    write_snapshot,
)
from relax.models.tensor_file import file_bytes

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
    with pytest.raises(SnapshotError, match=r"lacks \['files', 'num_tensors'\]"):
        read_snapshot(tmp_path / "v1")
    description.write_text("{")
    with pytest.raises(SnapshotError, match="must be JSON"):
        read_snapshot(tmp_path / "v1")
    description.write_text(json.dumps({"policy_version": 1, "num_tensors": 1, "files": {"../x": "0"}}))
    with pytest.raises(
        SnapshotError, match=r"must name model\*\.safetensors and their checksums, got \['../x'\]"
    ):
        read_snapshot(tmp_path / "v1")


def write_two(directory, version, weight, before=None):
    """Write a snapshot of two files, of which the second never changes."""
    first, second = file_names(2)
    with SnapshotWriter(directory, version, before) as writer:
        writer.add(WeightFile(name=first, tensors=("a",), content=file_bytes({"a": weight})))
        fixed = file_bytes({"b": torch.ones(3)}) if before is None else None
        writer.add(WeightFile(name=second, tensors=("b",), content=fixed))
        return writer.finish()


def test_snapshot_of_several_files_has_hugging_face_s_index(tmp_path):
    """Files are named as transformers names them; the index says where each tensor is."""
    written = write_two(tmp_path / "v1", 1, torch.zeros(2))
    assert read_snapshot(tmp_path / "v1")[1].keys() == {"a", "b"}
    index = json.loads((tmp_path / "v1" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }
    assert index["metadata"]["total_size"] == written.num_bytes == written.num_bytes_new


def test_snapshot_refers_to_files_of_the_one_before(tmp_path):
    """As links, which stay when that one is deleted; readers get what they do not have."""
    first = write_two(tmp_path / "v1", 1, torch.zeros(2))
    second = write_two(tmp_path / "v2", 2, torch.ones(2), first)
    same = "model-00002-of-00002.safetensors"
    assert (tmp_path / "v1" / same).samefile(tmp_path / "v2" / same)
    assert second.num_bytes_new < second.num_bytes == first.num_bytes
    for path in (tmp_path / "v1").iterdir():
        path.unlink()
    changes = read_changes(tmp_path / "v2", set(first.checksums.values()))
    assert (changes.policy_version, list(changes.tensors)) == (2, ["a"])
    assert read_snapshot(tmp_path / "v2")[1].keys() == {"a", "b"}


def test_snapshot_cannot_refer_to_what_was_not_there(tmp_path):
    """A file without content needs one before; nothing is left of the attempt."""
    with (
        pytest.raises(SnapshotError, match=r"must be in the snapshot before .*v1, got none there"),
        SnapshotWriter(tmp_path / "v1", 1) as writer,
    ):
        writer.add(WeightFile(name="model.safetensors"))
    assert list(tmp_path.iterdir()) == []


def test_weights_of_a_snapshot_are_brought_elsewhere(tmp_path):
    """With the index, without what only a snapshot has."""
    write_two(tmp_path / "v1", 1, torch.zeros(2))
    (tmp_path / "there").mkdir()
    copy_weights(tmp_path / "v1", tmp_path / "there")
    assert {path.name for path in (tmp_path / "there").iterdir()} == {
        *file_names(2),
        "model.safetensors.index.json",
    }
