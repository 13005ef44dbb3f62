"""Parts of parameters: what each rank holds, under which name, and the whole from the parts."""

from __future__ import annotations

import pytest
import torch

from relax.train.layout import LayoutConfig
from relax.train.shards import cut_of, global_name, is_expert, num_holders
from tests.kit.worlds import world_at

LAYER = "decoder.layers.3."


@pytest.mark.parametrize(
    "name",
    [
        "embedding.word_embeddings.weight",
        "output_layer.weight",
        LAYER + "self_attention.linear_qkv.weight",
        LAYER + "self_attention.linear_qkv.bias",
        LAYER + "self_attention.linear_proj.weight",
        LAYER + "mlp.linear_fc1.weight",
        LAYER + "mlp.linear_fc2.weight",
        LAYER + "mlp.router.weight",
        LAYER + "mlp.experts.local_experts.1.linear_fc1.weight",
        "decoder.final_layernorm.weight",
    ],
)
def test_cut_parts_make_the_whole_again(name) -> None:
    """Cut and joined, every value is at its place; shapes of parts tell that of the whole."""
    whole = torch.arange(8.0) if name.endswith(("bias", "norm.weight")) else torch.arange(64.0).view(8, 8)
    cut = cut_of(name)
    parts = [cut.part(whole, rank, 2) for rank in range(2)]
    assert torch.equal(cut.whole(parts), whole)
    assert cut.whole_shape(parts[0].shape, 2) == list(whole.shape)


def test_cut_gives_each_rank_its_gate_and_its_up_rows() -> None:
    """Gate is above up on each rank, as its activation takes them apart."""
    whole = torch.tensor([[1.0], [2.0], [10.0], [20.0]])
    assert cut_of(LAYER + "mlp.linear_fc1.weight").part(whole, 1, 2).flatten().tolist() == [2.0, 20.0]


def test_experts_are_never_cut() -> None:
    """Expert tensor parallel size is 1: with Megatron's default, tp, each rank would have half of each expert."""
    name = LAYER + "mlp.experts.local_experts.0.linear_fc1.weight"
    assert cut_of(name).dim is None
    assert is_expert(name)
    assert not is_expert(LAYER + "mlp.linear_fc1.weight")


def test_global_name_counts_layers_and_experts_over_all_ranks() -> None:
    """The second stage's first layer and the second rank's first expert are named so."""
    name = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"
    assert global_name(name, 4, 8) == "decoder.layers.4.mlp.experts.local_experts.9.linear_fc2.weight"
    assert global_name("decoder.final_layernorm.weight", 4, 8) == "decoder.final_layernorm.weight"


def test_num_holders_counts_each_parameter_once_over_a_stage() -> None:
    """Parts of matrices, whole norms, experts and towers are held by different numbers of ranks."""
    world = world_at(LayoutConfig(tp=2, dp=4, ep=2, pp=3), 0)
    held = {
        LAYER + "self_attention.linear_proj.weight": 4,
        LAYER + "input_layernorm.weight": 8,
        LAYER + "mlp.experts.local_experts.0.linear_fc1.weight": 4,
    }
    assert {name: num_holders(name, world, in_language_model=True) for name in held} == held
    assert num_holders("visual.blocks.0.mlp.linear_fc1.weight", world, in_language_model=False) == 8
