"""The trainer's configuration and its learning-rate schedule. It imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from relax.errors import ConfigError
from relax.train.layout import LayoutConfig

DECAYS = ("constant", "linear", "cosine")
DTYPES = ("fp32", "bf16")
OPTIMIZER_TESTS = (
    ("lr", lambda c: c.lr > 0, "above 0"),
    (
        "tower_lr",
        lambda c: c.tower_lr is None or c.tower_lr > 0,
        "above 0, or absent for that of the language model",
    ),
    ("warmup_steps", lambda c: c.warmup_steps >= 0, "at least 0"),
    ("lr_decay", lambda c: c.lr_decay in DECAYS, f"one of {', '.join(DECAYS)}"),
    ("decay_from", lambda c: 0 <= c.decay_from <= 1, "from 0 to 1"),
    ("min_lr_ratio", lambda c: 0 <= c.min_lr_ratio <= 1, "from 0 to 1"),
    ("beta1", lambda c: 0 <= c.beta1 < 1, "at least 0 and below 1"),
    ("beta2", lambda c: 0 <= c.beta2 < 1, "at least 0 and below 1"),
    ("epsilon", lambda c: c.epsilon > 0, "above 0"),
    ("weight_decay", lambda c: c.weight_decay >= 0, "at least 0"),
    (
        "max_grad_norm",
        lambda c: c.max_grad_norm is None or c.max_grad_norm > 0,
        "above 0, or absent for no clipping",
    ),
    ("max_tokens_per_micro_batch", lambda c: c.max_tokens_per_micro_batch >= 1, "at least 1"),
    ("num_threads", lambda c: c.num_threads >= 1, "at least 1"),
    ("dtype", lambda c: c.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
    ("rank_deadline_s", lambda c: c.rank_deadline_s >= 1, "at least 1"),
)


@dataclass(kw_only=True)
class TrainerConfig:
    """The trainer: the optimizer, its schedule, memory, what is trained and on how many processes."""

    lr: float = 1e-3
    """Learning rate of the language model after warm-up."""
    tower_lr: float | None = None
    """Learning rate of the image, video and audio towers; absent: `lr`."""
    freeze_towers: bool = False
    """Train the language model alone."""
    warmup_steps: int = 5
    """Optimizer steps in which the learning rate grows from nothing to its full value."""
    lr_decay: str = "constant"
    """After warm-up: `constant`, `linear` or `cosine` down to `min_lr_ratio` at step `decay_steps`."""
    decay_from: float = 0.0
    """Part of `decay_steps` in which the learning rate keeps its full value, warm-up included."""
    decay_steps: int | None = None
    """Optimizer step at which the decay ends; needed unless `lr_decay` is constant."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end of the decay, as a part of the full one."""
    beta1: float = 0.9
    """AdamW's decay of the gradient mean."""
    beta2: float = 0.99
    """AdamW's decay of the squared gradient mean."""
    epsilon: float = 1e-8
    """AdamW's floor of the denominator."""
    weight_decay: float = 0.0
    """AdamW's decay of weight matrices, a step and unit of learning rate; norms and biases are not decayed."""
    max_grad_norm: float | None = 1.0
    """Largest total gradient norm; larger ones are scaled down. Absent: none."""
    max_tokens_per_micro_batch: int = 16384
    """Most tokens, padding included, that go through the language model at a time."""
    share_prompts: bool = True
    """Run a group's prompt once and its completions as branches of it; off: a whole sequence for each row."""
    routing_replay: bool = True
    """Mixture-of-experts layers use the experts that the rollout used (R3)."""
    routing_metrics: bool = True
    """Without replay, fetch the rollout's routing all the same and count how often routers choose other experts; with
    replay it is always counted."""
    recompute: bool = False
    """Run the decoder layers again in the backward pass instead of keeping their activations."""
    packing: bool = False
    """Put the sequences of a micro-batch one after another instead of padding them to one length."""
    dtype: str = "fp32"
    """Of weights and activations: `fp32`, or `bf16` with fp32 master weights and gradients."""
    distributed_optimizer: bool = False
    """Keep each parameter's optimizer state on one of the ranks that hold it."""
    num_threads: int = 1
    """CPU threads of torch, in each process."""
    rank_deadline_s: float = 600.0
    """Longest wait of a rank for the others, in seconds."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """Processes, and what they share out."""

    def __post_init__(self) -> None:
        for key, test, rule in OPTIMIZER_TESTS:
            value = getattr(self, key)
            if (isinstance(value, float) and not math.isfinite(value)) or not test(self):
                raise ConfigError(f"actor.{key}: must be {rule}, got {value!r}")
        if self.lr_decay != "constant" and (self.decay_steps is None or self.decay_steps < 1):
            raise ConfigError(
                f"actor.decay_steps: must be at least 1 with lr_decay {self.lr_decay}, got {self.decay_steps}"
            )

    @property
    def num_procs(self) -> int:
        """Processes of the trainer."""
        return self.layout.num_procs


def lr_multiplier(config: TrainerConfig, step: int) -> float:
    """Return the part of the full learning rate that optimizer step `step` (from 1) uses."""
    if step < config.warmup_steps:
        return step / config.warmup_steps
    if config.lr_decay == "constant" or config.decay_steps is None:
        return 1.0
    start = max(config.warmup_steps, int(config.decay_from * config.decay_steps))
    if step <= start:
        return 1.0
    if step >= config.decay_steps:
        return config.min_lr_ratio
    done = (step - start) / (config.decay_steps - start)
    shape = 1 - done if config.lr_decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape
