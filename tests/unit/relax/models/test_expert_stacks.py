"""Stacks of experts come apart and together again, whichever way their matrices lie."""

from __future__ import annotations

import pytest
import torch

from relax.models.expert_stacks import ExpertStacks

HIDDEN, WIDTH, EXPERTS = 6, 4, 3


@pytest.mark.parametrize("turned", [False, True])
def test_stacks_come_back(turned: bool) -> None:
    """Each expert's matrices are [out, in]; joining gives the checkpoint's own tensors back; others pass through."""
    stored = {
        "a.experts.gate_up_proj": torch.randn(EXPERTS, 2 * WIDTH, HIDDEN),
        "a.experts.down_proj": torch.randn(EXPERTS, HIDDEN, WIDTH),
        "a.gate.weight": torch.randn(EXPERTS, HIDDEN),
    }
    on_disk = {k: v.transpose(1, 2).contiguous() if turned and v.dim() == 3 else v for k, v in stored.items()}
    stacks = ExpertStacks({name: tuple(tensor.shape) for name, tensor in on_disk.items()}, HIDDEN)
    parts = stacks.split(on_disk)
    assert torch.equal(parts["a.experts.1.gate_proj.weight"], stored["a.experts.gate_up_proj"][1, :WIDTH])
    assert torch.equal(parts["a.experts.1.up_proj.weight"], stored["a.experts.gate_up_proj"][1, WIDTH:])
    assert torch.equal(parts["a.experts.2.down_proj.weight"], stored["a.experts.down_proj"][2])
    joined = stacks.join(dict(reversed(parts.items())))
    assert joined.keys() == on_disk.keys()
    assert all(torch.equal(joined[name], on_disk[name]) for name in on_disk)


def test_checkpoints_without_stacks_pass_through() -> None:
    """Matrices of experts that are tensors of their own stay so."""
    tensors = {"a.experts.0.gate_proj.weight": torch.zeros(2, 2)}
    stacks = ExpertStacks({"a.experts.0.gate_proj.weight": (2, 2)}, 2)
    assert not stacks
    assert stacks.join(stacks.split(tensors)).keys() == tensors.keys()
