"""Every family of models: Megatron's logits are transformers', weights go out as they came in, R3 replays."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from relax.algorithms.config import AlgorithmConfig
from relax.errors import TrainingError
from relax.models.checkpoint_files import read_tensors
from relax.models.errors import CheckpointError, PromptError
from relax.models.families import FAMILIES
from relax.models.inputs import PromptInputs
from relax.models.spec import ThinkerSpec
from relax.models.thinker import load_thinker
from relax.rollout.engine import GenerateRequest
from relax.rollout.torch_engine import TorchEngine
from relax.train.batch import TrainBatch
from relax.train.config import TrainerConfig
from relax.train.trainer import Trainer
from tests.kit.families import MODELS, make_family
from tests.unit.relax.train.conftest import PlainPolicy, make_train_batch
from tests.unit.relax.train.test_agreement import roll_out

EVERY = sorted(MODELS)
TOLERANCE = 2e-5
"""Nats; the logprobs of these models are of the order of 10."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A directory of each family, made when it is asked for."""
    home, made = tmp_path_factory.mktemp("families"), {}

    def directory(name: str):
        if name not in made:
            made[name] = make_family(home / name, name)
        return made[name]

    return directory


def family_batch(directory, **changes):
    """Return a batch with all media of the directory's family in its prompts, in several orders."""
    spec = ThinkerSpec.from_pretrained(directory)
    towers = spec.family.towers
    # One clip a prompt: transformers lets the length of a prompt's other clips leak into Qwen3-Omni's short ones.
    more = tuple(tower for tower in towers if tower != "audio")
    kinds = [towers, towers[::-1], towers[:1], (), (*towers, *more)] if towers else [()]
    return make_train_batch(spec, num_groups=5, group_size=2, kinds=kinds, **changes)


def trainer_of(directory, **settings) -> Trainer:
    """Return a trainer of a directory."""
    return Trainer(directory, TrainerConfig(**settings), AlgorithmConfig(), seed=0)


def worst(left, right) -> float:
    """Return the largest difference of two lists of per-token values."""
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))


def test_every_family_has_a_tiny_model() -> None:
    """So that no family is added without the tests below."""
    assert {family.name for family in FAMILIES} == set(EVERY)


@pytest.mark.parametrize("name", EVERY)
def test_logprobs_equal_transformers(directories, name) -> None:
    """With all of the family's media in one batch: rotary positions, deepstack, biases and norms included."""
    directory = directories(name)
    batch = family_batch(directory)
    trainer = trainer_of(directory, routing_replay=False)
    ours, theirs = trainer.train_step(batch).trainer_logprobs, PlainPolicy(directory).logprobs(batch)
    assert worst(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("name", EVERY)
def test_weights_go_out_as_they_came_in(directories, name, tmp_path) -> None:
    """Every name, type and bit of the directory; and transformers loads what is saved with the same logits."""
    directory = directories(name)
    trainer = trainer_of(directory)
    stored, exported = load_file(directory / "model.safetensors"), trainer.policy.checkpoint_tensors()
    assert exported.keys() == stored.keys()
    for tensor_name, tensor in stored.items():
        assert torch.equal(exported[tensor_name], tensor), tensor_name
    trainer.save_pretrained(tmp_path / "saved", bucket_bytes=40_000)
    weight_map = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == stored.keys()
    assert len(set(weight_map.values())) > 2
    hf_class = getattr(transformers, ThinkerSpec.from_pretrained(directory).family.hf_class)
    _, info = hf_class.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert (info["missing_keys"], info["unexpected_keys"]) == (set(), set())
    batch = family_batch(directory)
    assert (
        worst(PlainPolicy(tmp_path / "saved").logprobs(batch), PlainPolicy(directory).logprobs(batch)) < 1e-6
    )


def routed(batch: TrainBatch, trainer: Trainer) -> TrainBatch:
    """Return the batch with the experts of the layers that have some, as the actor reads it."""
    layers = trainer.policy.routed_layers
    return dataclasses.replace(batch, routed_experts=[experts[:, layers] for experts in batch.routed_experts])


@pytest.mark.parametrize("name", EVERY)
def test_engine_and_trainer_speak_of_one_policy(directories, name, tmp_path) -> None:
    """Logprobs, and the experts of a mixture, before and after weights are published and adopted."""
    directory = directories(name)
    prompts = family_batch(directory).prompts
    engine, trainer = TorchEngine(directory), trainer_of(directory, lr=1e-2, warmup_steps=0)
    is_moe = ThinkerSpec.from_pretrained(directory).num_experts > 0
    for step in range(2):
        batch = roll_out(engine, prompts, 1.0)
        assert all((experts is not None) == is_moe for experts in batch.routed_experts)
        if is_moe:  # the actor reads the layers that have experts, and no others
            batch = routed(batch, trainer)
        metrics = trainer.train_step(batch).metrics
        assert metrics["logprob_difference_max_nats"] < 1e-4
        assert ("routing_mismatch" in metrics) == is_moe
        assert metrics.get("routing_mismatch", 0.0) <= 0.002  # a tie between two experts may fall either way
        trainer.publish(tmp_path / str(step), step + 1)
        engine.adopt(tmp_path / str(step), step + 1)
    engine.close()


@pytest.mark.parametrize("name", EVERY)
def test_greedy_tokens_are_transformers_best(directories, name) -> None:
    """Each token is the likeliest of transformers' own forward pass over what came before."""
    directory = directories(name)
    engine, plain = TorchEngine(directory), PlainPolicy(directory)
    for prompt in family_batch(directory).prompts[:3]:
        request = GenerateRequest(
            uid="", token_ids=prompt.token_ids, media=prompt.media, max_new_tokens=5, greedy=True
        )
        made = engine.generate([request])[0]
        assert made.finish_reason in ("stop", "length")
        with torch.no_grad():
            logits = plain.logits(prompt, made.token_ids)
        assert logits.argmax(-1).tolist() == made.token_ids.tolist()
    engine.close()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl", "qwen2_5_vl"])
def test_tied_embeddings(name, tmp_path) -> None:
    """The output matrix is the token embedding: absent from the directory, from snapshots, and from what is saved."""
    directory = make_family(tmp_path / "tied", name, tied=True)
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    batch, trainer = family_batch(directory), trainer_of(directory, lr=1e-2, warmup_steps=0)
    assert (
        worst(trainer.train_step(batch).trainer_logprobs, PlainPolicy(directory).logprobs(batch)) < TOLERANCE
    )
    trainer.save_pretrained(tmp_path / "saved")
    trained = trainer.train_step(batch).trainer_logprobs
    assert worst(PlainPolicy(tmp_path / "saved").logprobs(batch), trained) < TOLERANCE
    engine = TorchEngine(directory)
    trainer.publish(tmp_path / "1", 1)
    engine.adopt(tmp_path / "1", 1)
    metrics = trainer.train_step(roll_out(engine, batch.prompts, 1.0)).metrics
    assert metrics["logprob_difference_max_nats"] < 1e-4


def test_tied_embeddings_with_an_output_matrix_on_disk(directories, tmp_path) -> None:
    """Some directories have it all the same: it is passed over, and written as what it is."""
    directory = make_family(tmp_path / "tied", "qwen3", tied=True)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    exported = trainer_of(directory).policy.checkpoint_tensors()
    assert torch.equal(exported["lm_head.weight"], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("name", "speaker"), [("qwen3_omni_moe", "code2wav."), ("qwen2_5_omni", "token2wav.")]
)
def test_whole_omni_directory(directories, name, speaker, tmp_path) -> None:
    """The thinker among further models: their tensors are left alone, and are there again in what is saved."""
    thinker, whole = directories(name), tmp_path / "whole"
    shutil.copytree(thinker, whole)
    config = json.loads((thinker / "config.json").read_text())
    model_type = config["model_type"].removesuffix("_thinker")
    (whole / "config.json").write_text(json.dumps({"model_type": model_type, "thinker_config": config}))
    stored = {f"thinker.{key}": value for key, value in load_file(thinker / "model.safetensors").items()}
    stored |= {"talker.weight": torch.ones(3), f"{speaker}weight": torch.ones(2)}
    save_file(stored, whole / "model.safetensors", metadata={"format": "pt"})
    batch, trainer = family_batch(thinker), trainer_of(whole, routing_replay=False)
    assert worst(trainer.train_step(batch).trainer_logprobs, PlainPolicy(thinker).logprobs(batch)) < TOLERANCE
    assert trainer.policy.checkpoint_tensors().keys() == {n for n in stored if n.startswith("thinker.")}
    trainer_of(whole).save_pretrained(tmp_path / "saved")
    saved = read_tensors(tmp_path / "saved")
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[key], stored[key]) for key in stored)
    assert load_thinker(whole).names.text == "thinker.model."


def test_stacked_experts_as_the_hub_has_them(directories, tmp_path) -> None:
    """Matrices turned the other way round are read so, written so, and named so in snapshots."""
    ours, hub = directories("qwen3_vl_moe"), tmp_path / "hub"
    shutil.copytree(ours, hub)
    stored = load_file(ours / "model.safetensors")
    turned = {
        key: value.transpose(1, 2).contiguous() if ".experts." in key else value
        for key, value in stored.items()
    }
    save_file(turned, hub / "model.safetensors", metadata={"format": "pt"})
    batch, trainer = family_batch(ours), trainer_of(hub, routing_replay=False, lr=1e-2, warmup_steps=0)
    exported = trainer.policy.checkpoint_tensors()
    assert all(torch.equal(exported[key], turned[key]) for key in turned)
    assert worst(trainer.train_step(batch).trainer_logprobs, PlainPolicy(ours).logprobs(batch)) < TOLERANCE
    engine = TorchEngine(hub)
    trainer.publish(tmp_path / "1", 1)
    engine.adopt(tmp_path / "1", 1)
    rolled = routed(roll_out(engine, batch.prompts, 1.0), trainer)
    assert trainer.train_step(rolled).metrics["logprob_difference_max_nats"] < 1e-4


def test_unknown_family_is_refused(directories, tmp_path) -> None:
    """With all that there are."""
    shutil.copytree(directories("qwen3"), tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text()) | {"model_type": "llama"}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"model_type must be one of qwen3, qwen3_moe, .*, got 'llama'"):
        trainer_of(tmp_path / "other")


def test_media_without_a_tower_are_refused(directories) -> None:
    """By the engine, which says so in the completion, and by the trainer, before anything changes."""
    text, visual = directories("qwen3"), directories("qwen3_vl")
    prompt = family_batch(visual).prompts[0]
    message = r"media must be of the towers of a qwen3, \[\], got 1 of 'image'"
    engine = TorchEngine(text)
    made = engine.generate([GenerateRequest(uid="a", token_ids=prompt.token_ids, media=prompt.media)])
    assert made[0].finish_reason == "refused"
    with pytest.raises(PromptError, match=message):
        raise PromptError(made[0].error)
    batch = family_batch(text)
    batch.prompts[0] = PromptInputs(batch.prompts[0].token_ids, prompt.media)
    with pytest.raises(PromptError, match=message):
        trainer_of(text).train_step(batch)


def test_unsupported_text_settings_are_refused(tmp_path) -> None:
    """Biases that the layers here do not have are not ignored."""
    directory = make_family(tmp_path / "biased", "qwen3", attention_bias=True)
    with pytest.raises(TrainingError, match=r"attention_bias must be False, got True"):
        trainer_of(directory)
