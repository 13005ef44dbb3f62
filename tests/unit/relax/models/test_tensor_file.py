"""Files of weights: what safetensors reads, whatever the types and shapes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load

from relax.models.tensor_file import file_bytes


def test_file_is_what_safetensors_reads() -> None:
    """Types of all sizes, views, scalars and tensors without elements."""
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "half": torch.arange(5, dtype=torch.bfloat16),
        "step": torch.tensor(3.0),
        "wide": torch.arange(3, dtype=torch.int64),
        "view": torch.arange(12.0).view(3, 4).t()[1:],
        "none": torch.zeros(0, 4),
        "bytes": torch.arange(7, dtype=torch.uint8),
    }
    found = load(file_bytes(tensors).numpy().tobytes())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_file_is_a_copy() -> None:
    """What changes afterwards is not in it."""
    weight = torch.zeros(4)
    content = file_bytes({"weight": weight})
    weight.fill_(1.0)
    assert torch.equal(load(content.numpy().tobytes())["weight"], torch.zeros(4))


def test_file_refuses_types_that_the_format_lacks() -> None:
    """By name."""
    with pytest.raises(
        ValueError, match=r"^file_bytes: z must be of a type in safetensors, got torch.complex"
    ):
        file_bytes({"z": torch.zeros(2, dtype=torch.complex64)})
