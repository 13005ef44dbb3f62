"""Weights on their way to SGLang: names, buckets, and the payload's form."""

from __future__ import annotations

import base64
import io
import pickletools

import pytest
import torch
from safetensors.torch import save_file

from relax.errors import SnapshotError
from relax.models.layout import TensorLayout, read_layout
from relax.rollout.sglang_weights import _saved, check_names, payloads, read_buckets
from relax.rollout.sglang_weights_wire import BucketEntry, flattened_bucket

ADMITTED = {
    "torch.storage _load_from_bytes",
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch Size",
    "torch bfloat16",
    "sglang.srt.weight_sync.tensor_bucket FlattenedTensorMetadata",
}
"""Names that SGLang's own reader lets through."""


def test_names_and_shapes_must_be_the_models() -> None:
    """Missing, unknown and misshapen tensors are named."""
    model = {"a": TensorLayout("F32", (2, 3)), "b": TensorLayout("F32", (1,))}
    check_names(model, model, "dir")
    with pytest.raises(SnapshotError, match=r"dir must hold .* lacks 1 \['b'\], has 1 unknown \['c'\]"):
        check_names({"a": model["a"], "c": model["b"]}, model, "dir")
    with pytest.raises(SnapshotError, match=r"a of dir must have shape \[2, 3\], got \[3, 2\]"):
        check_names(model | {"a": TensorLayout("F32", (3, 2))}, model, "dir")


def test_there_is_a_payload_for_every_rank() -> None:
    """A server dies when it gets fewer payloads than it has tensor-parallel ranks."""
    assert payloads(b"xy", 3) == [base64.b64encode(b"xy").decode()] * 3


def test_buckets_hold_every_tensor_once_within_the_limit(tmp_path) -> None:
    """Cut by bytes, types mixed, a tensor that is larger than a bucket alone."""
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.ones(4, dtype=torch.bfloat16),
        "large": torch.zeros(100),
        "c": torch.tensor([7], dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = {}
    for bucket in read_buckets(tmp_path, 40):
        assert bucket.flat.numel() <= 40 or len(bucket.entries) == 1
        for entry in bucket.entries:
            piece = bucket.flat[entry.start : entry.end].view(getattr(torch, entry.dtype))
            found[entry.name] = piece.reshape(entry.shape)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, atol=0, rtol=0)


def test_payload_is_well_formed_and_names_only_what_sglang_admits() -> None:
    """The opcodes are those of the format, to the end of the stack."""
    flat = torch.arange(12, dtype=torch.uint8)
    payload = flattened_bucket(_saved(flat), 12, [BucketEntry("w", "bfloat16", (2, 3), 0, 12)])
    opcodes = list(pickletools.genops(payload))
    assert {argument for opcode, argument, _ in opcodes if opcode.name == "GLOBAL"} == ADMITTED
    pickletools.dis(payload, out=io.StringIO())  # raises when the stack does not come out


def test_layout_is_read_from_headers(tmp_path) -> None:
    """Names, types and shapes of all files of a directory."""
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "2.safetensors")
    assert read_layout(tmp_path) == {"a": TensorLayout("F32", (2, 3)), "b": TensorLayout("BF16", (4,))}
