"""Names and layouts: every tensor of a directory comes back as it was; what does not fit is refused by name."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from relax.errors import TrainingError
from relax.train.names import NameMap
from relax.train.policy import OmniPolicy
from relax.train.runtime import start_parallel

MAP = NameMap(text="thinker.model.", head="thinker.lm_head.weight", num_heads=4, num_groups=2, head_size=3)


@pytest.fixture(autouse=True)
def parallel() -> None:
    """Megatron's groups, for the policies below."""
    start_parallel(0)


@pytest.mark.parametrize("which", ["thinker_dir", "omni_dir"])
def test_checkpoint_tensors_are_those_of_the_directory(which, request) -> None:
    """Loading and exporting gives back every name, type and bit, with and without prefix."""
    directory = request.getfixturevalue(which)
    stored = load_file(directory / "model.safetensors")
    exported = OmniPolicy(directory, start_parallel(0)).checkpoint_tensors()
    assert exported.keys() == stored.keys()
    for name, tensor in stored.items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(exported[name], tensor), name


def test_name_map_groups_queries_with_their_key_and_value() -> None:
    """Each key/value group holds its queries, then its key, then its value; bias vectors too."""
    q, k, v = (torch.arange(n * 3.0) + start for n, start in ((4, 100.0), (2, 200.0), (2, 300.0)))
    rule = MAP.rule("decoder.layers.7.self_attention.linear_qkv.bias")
    assert rule.names == tuple(f"thinker.model.layers.7.self_attn.{x}_proj.bias" for x in "qkv")
    merged = rule.merge([q, k, v])
    expected = torch.cat([q[:6], k[:3], v[:3], q[6:], k[3:], v[3:]])
    assert torch.equal(merged, expected)
    assert all(torch.equal(a, b) for a, b in zip(rule.split(merged), (q, k, v), strict=True))


def test_name_map_puts_gate_above_up() -> None:
    """An expert's first matrix is its gate over its up projection."""
    rule = MAP.rule("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight")
    stem = "thinker.model.layers.0.mlp.experts.3."
    assert rule.names == (f"{stem}gate_proj.weight", f"{stem}up_proj.weight")
    gate, up = torch.zeros(2, 5), torch.ones(2, 5)
    assert torch.equal(rule.merge([gate, up]), torch.cat([gate, up]))
    assert [tuple(part.shape) for part in rule.split(rule.merge([gate, up]))] == [(2, 5), (2, 5)]


@pytest.mark.parametrize("name", ["decoder.layers.0.mlp.linear_fc3.weight", "vision.weight"])
def test_name_map_refuses_an_unknown_parameter(name) -> None:
    """A parameter without a rule is an error, not a tensor left behind."""
    with pytest.raises(TrainingError, match="add a rule for it"):
        MAP.rule(name)


def _edited(thinker_dir, tmp_path, edit):
    directory = tmp_path / "edited"
    shutil.copytree(thinker_dir, directory)
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_policy_refuses_a_tensor_that_it_does_not_have(thinker_dir, tmp_path) -> None:
    """An unknown name is refused and said."""
    directory = _edited(thinker_dir, tmp_path, lambda t: t.update({"extra.weight": torch.zeros(2)}))
    with pytest.raises(
        TrainingError, match=r"must hold only tensors of a qwen3_omni_moe, got 1 others, first 'extra"
    ):
        OmniPolicy(directory, start_parallel(0))


def test_name_map_refuses_a_missing_and_a_misshapen_tensor() -> None:
    """Both are named, with what was expected."""
    parameters = [("decoder.layers.0.mlp.router.weight", torch.zeros(4, 8))]
    with pytest.raises(TrainingError, match=r"must hold 'thinker.model.layers.0.mlp.gate.weight'"):
        MAP.from_checkpoint(parameters, {})
    wrong = {"thinker.model.layers.0.mlp.gate.weight": torch.zeros(4, 9)}
    with pytest.raises(TrainingError, match=r"gate.weight' must be \[4, 8\], got \[4, 9\]"):
        MAP.from_checkpoint(parameters, wrong)
