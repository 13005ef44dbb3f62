"""GRPO in plain transformers and torch: what our trainer is compared with. Not a fake, and none of our code.

A frozen copy of the start, transformers' own forward pass with its own towers and rotary positions, the loss as the
paper has it, `clip_grad_norm_` and AdamW. No Megatron, no queue, no shared prompts: each row is a whole sequence.

    A = (r - mean(r)) / std(r)                              rewards of a group, n - 1 in the deviation
    loss = - sum over tokens of min(rho A, clip(rho) A) - beta (e^d - d - 1),  over the tokens of the batch
    rho = pi / pi_rollout,  d = log pi_start - log pi

Source: DeepSeekMath (arXiv:2402.03300), equations 3 and 4; the mean over tokens is DAPO's (arXiv:2503.14476), equation
8. Routing replay: arXiv:2510.11370, section 3; the gates stay the trained router's.

Shapes: B rows run together, T tokens (padded on the right), V vocabulary, L layers with experts, K experts of a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.utils import logging as hf_logging


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One recorded rollout."""

    group: int
    prompt_token_ids: np.ndarray
    media: Mapping[str, Sequence[Mapping[str, np.ndarray]]]
    """By `image`, `video`, `audio`, each in the order of the prompt: uint8 `patches` with `grid_thw` (and
    `second_per_grid`), or `features`."""
    completion_token_ids: np.ndarray
    rollout_logprobs: np.ndarray
    reward: float
    routed_experts: np.ndarray | None = None
    """[num_prompt_tokens + num_completion_tokens - 1, L, K]."""


@dataclass(frozen=True, kw_only=True)
class PlainSettings:
    """The numbers of the run."""

    lr: float
    warmup_steps: int
    betas: tuple[float, float]
    epsilon: float
    max_grad_norm: float
    clip_low: float
    clip_high: float
    kl_coef: float
    replay: bool
    max_rows: int | None = None
    """Rows that run together; None: those of a group, whose clips are equally long (the audio tower of transformers
    5.12 lets the longest clip of a call leak into the others)."""


@dataclass(frozen=True)
class PlainStep:
    """What one step saw before the weights changed."""

    loss: float
    grad_norm: float
    logprobs: list[np.ndarray]
    """[num_completion_tokens] for each row."""


@dataclass
class _Routes:
    """The experts that the routers have to use in this pass: [B * T, L, K], or None for their own choice."""

    experts: Tensor | None = None


@dataclass
class PlainGrpo:
    """A thinker, the copy that it started from, and AdamW."""

    model_dir: Path
    settings: PlainSettings
    num_steps: int = 0
    _routes: _Routes = field(default_factory=_Routes)

    def __post_init__(self) -> None:
        config = json.loads((self.model_dir / "preprocessor_config.json").read_text())
        self._mean, self._std = config["image_mean"], config["image_std"]
        self.policy = _load(self.model_dir).requires_grad_(True)
        self.start = _load(self.model_dir).requires_grad_(False) if self.settings.kl_coef else None
        _hook_routers(self.policy, self._routes)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=self.settings.lr,
            betas=self.settings.betas,
            eps=self.settings.epsilon,
            weight_decay=0.0,
        )

    def step(self, samples: Sequence[Sample]) -> PlainStep:
        """Take one optimizer step on whole groups."""
        settings = self.settings
        advantages = group_advantages(samples)
        num_tokens = sum(len(sample.completion_token_ids) for sample in samples)
        for parameter in self.policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        total, seen = 0.0, {}
        for rows in self._row_sets(samples):
            chosen = [samples[row] for row in rows]
            with torch.no_grad():
                start = None if self.start is None else self._logprobs(self.start, chosen)
            with self._replaying(chosen):
                logprobs = self._logprobs(self.policy, chosen)
            weight = torch.cat(
                [advantages[row].expand(len(samples[row].completion_token_ids)) for row in rows]
            )
            loss = token_losses(logprobs, chosen, weight, start, settings).sum() / num_tokens
            loss.backward()
            total += float(loss.detach())
            lengths = [len(sample.completion_token_ids) for sample in chosen]
            seen |= dict(zip(rows, logprobs.detach().split(lengths), strict=True))
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), settings.max_grad_norm)
        self.num_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, self.num_steps / max(1, settings.warmup_steps))
        self.optimizer.step()
        return PlainStep(total, float(norm), [seen[row].numpy() for row in range(len(samples))])

    def weights(self) -> dict[str, Tensor]:
        """Return the weights under the names of the checkpoint, which has a tensor for each matrix of an expert."""
        found: dict[str, Tensor] = {}
        for name, value in self.policy.state_dict().items():
            stem, _, kind = f"thinker.{name}".rpartition(".")
            if kind == "gate_up_proj":
                for expert, both in enumerate(value):
                    gate, up = both.chunk(2)
                    found |= {
                        f"{stem}.{expert}.gate_proj.weight": gate,
                        f"{stem}.{expert}.up_proj.weight": up,
                    }
            elif kind == "down_proj":
                found |= {f"{stem}.{expert}.down_proj.weight": each for expert, each in enumerate(value)}
            else:
                found[f"{stem}.{kind}"] = value
        return found

    def _row_sets(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Return which rows run together."""
        if self.settings.max_rows is not None:
            order = sorted(range(len(samples)), key=lambda row: len(samples[row].prompt_token_ids))
            count = self.settings.max_rows
            return [order[first : first + count] for first in range(0, len(order), count)]
        groups: dict[int, list[int]] = {}
        for row, sample in enumerate(samples):
            groups.setdefault(sample.group, []).append(row)
        return list(groups.values())

    def _logprobs(self, model: Any, samples: Sequence[Sample]) -> Tensor:
        """Return the completions' log-probabilities, row after row."""
        inputs, mask = _padded([_tokens(sample) for sample in samples])
        logits = model(input_ids=inputs, attention_mask=mask, use_cache=False, **self._media(samples)).logits
        found = []
        for row, sample in enumerate(samples):
            first = len(sample.prompt_token_ids) - 1
            tokens = torch.from_numpy(sample.completion_token_ids.astype(np.int64))
            predicted = logits[row, first : first + len(tokens)].log_softmax(-1)
            found.append(predicted.gather(1, tokens[:, None])[:, 0])
        return torch.cat(found)

    def _media(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return the arguments of transformers' `forward` for all media of the rows."""
        found: dict[str, Tensor] = {}
        for kind, name, grid in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            media = [medium for sample in samples for medium in sample.media.get(kind, ())]
            if media:
                found[name] = self._pixels(np.concatenate([medium["patches"] for medium in media]))
                found[grid] = torch.tensor(np.stack([medium["grid_thw"] for medium in media])).long()
            if media and kind == "video":
                seconds = [float(medium["second_per_grid"]) for medium in media]
                found["video_second_per_grid"] = torch.tensor(seconds)
        clips = [
            torch.from_numpy(m["features"]).T for sample in samples for m in sample.media.get("audio", ())
        ]
        if clips:
            padded = nn.utils.rnn.pad_sequence(clips, batch_first=True)
            found["input_features"] = padded.transpose(1, 2)
            frames = torch.tensor([len(clip) for clip in clips])
            found["feature_attention_mask"] = (torch.arange(padded.shape[1]) < frames[:, None]).long()
        return found

    def _pixels(self, patches: np.ndarray) -> Tensor:
        """Return patches (colour by colour) as the image processor rescales and normalises them."""
        values = torch.from_numpy(patches).float().view(len(patches), 3, -1) / 255
        mean, std = (torch.tensor(numbers)[:, None] for numbers in (self._mean, self._std))
        return ((values - mean) / std).flatten(1)

    @contextmanager
    def _replaying(self, samples: Sequence[Sample]) -> Iterator[None]:
        """Have the routers of the policy use the rollouts' experts in the block, if so set."""
        if self.settings.replay:
            self._routes.experts = _padded_experts(samples)
        try:
            yield
        finally:
            self._routes.experts = None


def group_advantages(samples: Sequence[Sample]) -> Tensor:
    """Return the advantage of each row: reward minus the group's mean, over its deviation; 0 if all are equal."""
    rewards = torch.tensor([sample.reward for sample in samples])
    found = torch.zeros_like(rewards)
    for row, sample in enumerate(samples):
        own = rewards[[other.group == sample.group for other in samples]]
        if own.max() > own.min():
            found[row] = (rewards[row] - own.mean()) / own.std()
    return found


def token_losses(
    logprobs: Tensor,
    samples: Sequence[Sample],
    advantages: Tensor,
    start: Tensor | None,
    settings: PlainSettings,
) -> Tensor:
    """Return the loss of each token from its log-probabilities: clipped policy gain and k3 against the start."""
    rollout = torch.from_numpy(np.concatenate([sample.rollout_logprobs for sample in samples]))
    ratio = torch.exp(logprobs - rollout)
    clipped = ratio.clip(1 - settings.clip_low, 1 + settings.clip_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    if start is not None:
        difference = start - logprobs
        gain = gain - settings.kl_coef * (difference.exp() - difference - 1)
    return -gain


def _load(model_dir: Path) -> Any:
    hf_logging.disable_progress_bar()
    model: Any = Qwen3OmniMoeThinkerForConditionalGeneration
    return model.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True).eval()


def _tokens(sample: Sample) -> np.ndarray:
    """Return what the model reads: the last token predicts nothing."""
    return np.concatenate([sample.prompt_token_ids, sample.completion_token_ids[:-1]])


def _padded(rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Return token ids and mask [B, T], int64."""
    tokens = [torch.from_numpy(row.astype(np.int64)) for row in rows]
    lengths = torch.tensor([len(row) for row in tokens])
    padded = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    return padded, (torch.arange(padded.shape[1]) < lengths[:, None]).long()


def _padded_experts(samples: Sequence[Sample]) -> Tensor:
    """Return the experts [B * T, L, K], int64; padding goes to the first ones."""
    tables = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
    if len(tables) != len(samples):
        raise ValueError("plain_grpo: every rollout must have its routing for replay, got one without")
    shape = (len(tables), max(len(table) for table in tables), *tables[0].shape[1:])
    experts = np.broadcast_to(np.arange(shape[-1]), shape).copy()
    for row, table in enumerate(tables):
        experts[row, : len(table)] = table
    return torch.from_numpy(experts).flatten(0, 1)


def _hook_routers(model: Any, routes: _Routes) -> None:
    """Replace the routers' choice, and the gates that go with it, while there are `routes`."""

    def hook(layer: int) -> Any:
        def force(gate: Any, arguments: tuple, output: tuple[Tensor, Tensor, Tensor]) -> tuple | None:
            if routes.experts is None:
                return None
            logits, _, _ = output
            chosen = routes.experts[:, layer]
            gates = logits.float().softmax(-1).gather(1, chosen)
            if gate.norm_topk_prob:
                gates = gates / gates.sum(-1, keepdim=True)
            return logits, gates.to(logits.dtype), chosen

        return force

    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    for number, router in enumerate(routers):
        router.register_forward_hook(hook(number))
