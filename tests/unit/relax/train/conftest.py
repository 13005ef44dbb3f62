"""Tiny thinkers on disk, made-up batches that fit them, and the same step in plain transformers and torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.utils import logging as hf_logging

from modalities.base import num_audio_tokens
from relax.algorithms.config import AlgorithmConfig
from relax.models.batch import hf_inputs
from relax.models.inputs import Encoded, PromptInputs
from relax.models.spec import ThinkerSpec
from relax.models.thinker import Thinker, collate, load_thinker
from relax.models.tiny import make_tiny_omni
from relax.train.batch import TrainBatch

NUM_EXPERTS, TOP_K, NUM_MEL_BINS, PATCH = 5, 2, 32, 8
SECONDS = 0.5
"""Between two temporal patches of a film."""
END = 9
"""An ordinary token after each medium; the model does not look for one."""
MIXED = (("image", "audio", "video"), ("video", "image"), ("audio",), ())

BatchMaker = Callable[..., TrainBatch]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Keep torch on one thread."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def thinker_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare thinker (names without prefix): grouped queries, a dense layer between, two deepstack layers."""
    directory = tmp_path_factory.mktemp("thinker")
    return make_thinker(directory, thinker_config())


def make_thinker(directory: Path, config: Qwen3OmniMoeThinkerConfig) -> Path:
    """Write a thinker with random weights, always the same ones."""
    torch.manual_seed(0)
    hf_logging.disable_progress_bar()
    model = Qwen3OmniMoeThinkerForConditionalGeneration(config)
    model.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.4, 0.5, 0.6], "image_std": [0.3, 0.25, 0.2]})
    )
    return directory


@pytest.fixture(scope="session")
def omni_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of the main job (names start with `thinker.`), with tokenizer and templates."""
    return make_tiny_omni(tmp_path_factory.mktemp("omni"), seed=1)


@pytest.fixture(scope="session")
def make_batch(thinker_dir: Path) -> BatchMaker:
    """Return a function that makes up a batch for `thinker_dir`."""
    return partial(make_train_batch, ThinkerSpec.from_pretrained(thinker_dir))


def make_train_batch(
    spec: ThinkerSpec,
    seed: int = 0,
    num_groups: int = 4,
    group_size: int = 3,
    *,
    kinds: Sequence[Sequence[str]] = MIXED,
    routed: bool = False,
    num_experts: int = NUM_EXPERTS,
) -> TrainBatch:
    """Make up a batch; with `routed` each token has random experts in the two layers that have some."""
    rng = np.random.default_rng(seed)
    prompts = [make_prompt(rng, kinds[i % len(kinds)], spec) for i in range(num_groups)]
    groups = np.repeat(np.arange(num_groups, dtype=np.int32), group_size)
    completions = [rng.integers(10, 400, rng.integers(1, 5)).astype(np.int32) for _ in groups]
    logprobs = [-rng.uniform(4, 8, len(tokens)).astype(np.float32) for tokens in completions]
    experts: list[np.ndarray | None] = [None] * len(groups)
    if routed:
        of_prompt = [make_experts(rng, len(prompt.token_ids), num_experts) for prompt in prompts]
        experts = [
            np.concatenate([of_prompt[group], make_experts(rng, len(tokens) - 1, num_experts)])
            for group, tokens in zip(groups, completions, strict=True)
        ]
    return TrainBatch(
        prompts=prompts,
        groups=groups,
        completion_token_ids=completions,
        rollout_logprobs=logprobs,
        routed_experts=experts,
        rewards=rng.random(len(groups)).astype(np.float32),
    )


@pytest.fixture(scope="session")
def omni_prompts(omni_dir: Path) -> list[PromptInputs]:
    """Prompts of all kinds for `omni_dir`."""
    spec, rng = ThinkerSpec.from_pretrained(omni_dir), np.random.default_rng(0)
    return [make_prompt(rng, kinds, spec) for kinds in (*MIXED, ("image",), ("video",))]


@pytest.fixture
def plain(thinker_dir: Path) -> PlainPolicy:
    """The policy of `thinker_dir` without Megatron."""
    return PlainPolicy(thinker_dir)


def make_experts(rng: np.random.Generator, num_tokens: int, num_experts: int = NUM_EXPERTS) -> np.ndarray:
    """Return random distinct experts for each token of the two layers that have some."""
    order = np.argsort(rng.random((num_tokens, 2, num_experts)), axis=-1)
    return order[..., :TOP_K].astype(np.uint8)


def make_prompt(rng: np.random.Generator, kinds: Sequence[str], spec: ThinkerSpec) -> PromptInputs:
    """Return a prompt with random media of the given towers, in this order, and random words around them."""
    pads = {"image": spec.image_token_id, "audio": spec.audio_token_id, "video": spec.video_token_id}
    ids = rng.integers(10, 400, 2).tolist()
    media: dict[str, list[Encoded]] = {}
    for kind in kinds:
        encoded, runs = _medium(rng, kind, spec)
        start = spec.audio_start_token_id if kind == "audio" else spec.vision_start_token_id
        for num_tokens in runs:
            ids += [start, *[pads[kind]] * num_tokens, END]
        media.setdefault(kind, []).append(encoded)
    ids += rng.integers(10, 400, rng.integers(3, 9)).tolist()
    return PromptInputs(np.array(ids, np.int32), media)


def _medium(rng: np.random.Generator, kind: str, spec: ThinkerSpec) -> tuple[Encoded, list[int]]:
    """Return a random medium and the lengths of its runs of placeholders."""
    if kind == "audio":
        num_frames = int(rng.integers(30, 130))
        features = rng.standard_normal((spec.num_mel_bins, num_frames)).astype(np.float32)
        return {"features": features}, [num_audio_tokens(num_frames, spec.audio_rule)]
    grid = np.array([1 if kind == "image" else 2, 4, 2 * rng.integers(1, 4)], np.int32)
    patches = rng.integers(0, 256, (int(grid.prod()), spec.patch_values), dtype=np.uint8)
    encoded = {"patches": patches, "grid_thw": grid}
    if kind == "video":
        encoded["second_per_grid"] = np.array(SECONDS, np.float32)
    runs = int(grid[0]) if spec.family.film_in_frames else 1
    return encoded, [int(grid.prod()) // 4 // runs] * runs


def thinker_config(**text_changes: object) -> Qwen3OmniMoeThinkerConfig:
    text: dict[str, object] = {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "eos_token_id": 2,
    }
    text |= text_changes
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": PATCH,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.2,
    }
    audio = {
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "num_mel_bins": NUM_MEL_BINS,
        "n_window": 50,
        "n_window_infer": 800,
        "downsample_hidden_size": 8,
        "output_dim": 32,
        "initializer_range": 0.2,
    }
    return Qwen3OmniMoeThinkerConfig(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        image_token_id=500,
        audio_token_id=501,
        video_token_id=502,
        vision_start_token_id=503,
        vision_end_token_id=504,
        audio_start_token_id=505,
        audio_end_token_id=506,
        user_token_id=5,
        initializer_range=0.2,
    )


class PlainPolicy:
    """A transformers thinker that scores rows and takes gradients: one row at a time, each a whole sequence."""

    def __init__(self, model_dir: Path) -> None:
        self.thinker: Thinker = load_thinker(model_dir)
        self.thinker.hf.requires_grad_(True)

    def row_logits(self, batch: TrainBatch, row: int) -> Tensor:
        """Return the logits [num_completion_tokens, V] that predict the row's completion."""
        return self.logits(batch.prompts[batch.groups[row]], batch.completion_token_ids[row])

    def logits(self, prompt: PromptInputs, tokens: np.ndarray) -> Tensor:
        """Return the logits [num_completion_tokens, V] that predict a prompt's completion."""
        whole = PromptInputs(np.concatenate([prompt.token_ids, tokens]), prompt.media)
        inputs = hf_inputs(collate([whole], self.thinker.spec), self.thinker.spec)
        first = len(prompt.token_ids) - 1
        return self.thinker.hf(**inputs).logits[0, first : first + len(tokens)]

    def logprobs(self, batch: TrainBatch) -> list[np.ndarray]:
        """Return the completions' log-probabilities, row by row."""
        with torch.no_grad():
            scored = [self._scored(batch, row) for row in range(batch.num_rows)]
        return [logprobs.numpy() for logprobs, _ in scored]

    def loss(self, batch: TrainBatch, algorithm: AlgorithmConfig) -> Tensor:
        """Return GRPO's clipped loss, mean over the batch's tokens, with entropy bonus."""
        rewards, total, count = torch.tensor(batch.rewards), torch.zeros(()), 0
        for row in range(batch.num_rows):
            own = rewards[torch.tensor(batch.groups == batch.groups[row])]
            advantage = (rewards[row] - own.mean()) / own.std()
            logprobs, entropy = self._scored(batch, row)
            ratio = (logprobs - torch.tensor(batch.rollout_logprobs[row])).exp()
            bounded = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
            gain = torch.minimum(ratio * advantage, bounded * advantage) + algorithm.entropy_coef * entropy
            total, count = total - gain.sum(), count + len(logprobs)
        return total / count

    def gradients(self, batch: TrainBatch, algorithm: AlgorithmConfig) -> dict[str, Tensor]:
        """Return the loss's gradients under names without prefix, experts apart; zeros where there is none."""
        self.thinker.hf.zero_grad()
        self.loss(batch, algorithm).backward()
        gradients: dict[str, Tensor] = {}
        for name, parameter in self.thinker.hf.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            stem, _, kind = name.rpartition(".")
            for expert, matrix in enumerate(gradient if kind in ("gate_up_proj", "down_proj") else ()):
                if kind == "down_proj":
                    gradients[f"{stem}.{expert}.down_proj.weight"] = matrix
                else:
                    gate, up = matrix.chunk(2)
                    gradients[f"{stem}.{expert}.gate_proj.weight"] = gate
                    gradients[f"{stem}.{expert}.up_proj.weight"] = up
            if kind not in ("gate_up_proj", "down_proj"):
                gradients[name] = gradient
        return gradients

    def _scored(self, batch: TrainBatch, row: int) -> tuple[Tensor, Tensor]:
        log_probs = self.row_logits(batch, row).log_softmax(-1)
        tokens = torch.tensor(batch.completion_token_ids[row]).long()
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(1, tokens[:, None])[:, 0], entropy
