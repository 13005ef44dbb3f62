"""Megatron's language model against transformers: logits on the same weights, with all modalities in the prompt."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from relax.algorithms.config import AlgorithmConfig
from relax.errors import TrainingError
from relax.train.config import TrainerConfig
from relax.train.language_model import DecoderInputs, ThinkerLanguageModel, moe_layers, transformer_config
from relax.train.names import NameMap
from relax.train.runtime import start_parallel
from relax.train.trainer import Trainer


def worst_difference(left: list[np.ndarray], right: list[np.ndarray]) -> float:
    """Return the largest difference of two lists of per-token values."""
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    "kinds",
    [("image",), ("audio",), ("video",), ("video", "audio", "image", "audio"), ()],
    ids=lambda kinds: "+".join(kinds) or "text",
)
def test_logits_equal_transformers(thinker_dir, make_batch, plain, kinds) -> None:
    """Each modality, mixed prompts and plain text score the same to 1e-4."""
    batch = make_batch(kinds=[kinds, kinds[:1]], num_groups=2)
    trainer = Trainer(thinker_dir, TrainerConfig(routing_replay=False), AlgorithmConfig(), seed=0)
    assert worst_difference(trainer.train_step(batch).trainer_logprobs, plain.logprobs(batch)) < 1e-4


@pytest.mark.parametrize(
    "name",
    [
        "visual.blocks.0.mlp.linear_fc1.weight",
        "visual.merger_list.1.mlp.2.weight",
        "audio_tower.conv2d1.weight",
        "language_model.decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight",
        "language_model.decoder.layers.0.self_attention.q_layernorm.weight",
        "language_model.decoder.layers.2.mlp.router.weight",
    ],
)
def test_logits_equality_is_sensitive_to_each_part(thinker_dir, make_batch, plain, name) -> None:
    """Moving one weight matrix a little breaks the equality, so the test above sees that part."""
    batch = make_batch(kinds=[("image", "audio", "video")], num_groups=2)
    trainer = Trainer(thinker_dir, TrainerConfig(routing_replay=False), AlgorithmConfig(), seed=0)
    with torch.no_grad():
        parameter = dict(trainer.policy.named_parameters())[name]
        parameter += 0.02 * torch.randn_like(parameter)
    assert worst_difference(trainer.train_step(batch).trainer_logprobs, plain.logprobs(batch)) > 1e-4


@pytest.mark.parametrize("tied", [False, True])
def test_dense_text_model_equals_transformers(tied) -> None:
    """A dense Qwen3 with and without tied embeddings has transformers' logits."""
    start_parallel(0)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    theirs = Qwen3ForCausalLM(config).eval()
    ours = ThinkerLanguageModel(config, tied=tied)
    names = NameMap(text="model.", head="lm_head.weight", num_heads=4, num_groups=2, head_size=16)
    names.from_checkpoint(ours.named_parameters(), theirs.state_dict())
    ids = torch.randint(0, 96, (2, 7))
    positions = torch.arange(7.0).expand(3, 2, 7)
    inputs = DecoderInputs(embeds_TBH=ours.embed_tokens(ids).transpose(0, 1), position_ids_3BT=positions)
    with torch.no_grad():
        got = ours.logits(ours.hidden_states(inputs).flatten(0, 1)).view(7, 2, 96).transpose(0, 1)
        torch.testing.assert_close(got, theirs(ids).logits, atol=1e-4, rtol=0)


def test_hidden_states_refuses_more_deepstack_than_layers(thinker_dir) -> None:
    """Features without a layer would be dropped silently otherwise."""
    trainer = Trainer(thinker_dir, TrainerConfig(), AlgorithmConfig(), seed=0)
    inputs = DecoderInputs(
        embeds_TBH=torch.zeros(2, 1, 32),
        position_ids_3BT=torch.zeros(3, 1, 2),
        deepstack=[torch.zeros(1, 32)] * 4,
        visual_place_S=torch.tensor([0]),
    )
    with pytest.raises(TrainingError, match="deepstack must be for at most 3 layers, got 4"):
        trainer.policy.language_model.hidden_states(inputs)


def test_transformer_config_refuses_what_it_does_not_do() -> None:
    """Scaled rotary positions are refused, not ignored."""
    config = Qwen3Config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})
    with pytest.raises(TrainingError, match=r"rope_type must be 'default', got 'yarn'"):
        transformer_config(config)


def test_moe_layers_follow_the_step_and_the_exceptions() -> None:
    """Every second layer has experts, but those named dense."""
    config = SimpleNamespace(num_hidden_layers=6, num_experts=4, decoder_sparse_step=2, mlp_only_layers=[3])
    assert moe_layers(config) == [False, True, False, False, False, True]
