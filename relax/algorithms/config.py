"""The choice of algorithm and its numbers. It computes nothing and imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from relax.errors import ConfigError

ADVANTAGES = ("grpo", "dr_grpo", "rloo")
POLICY_LOSSES = ("ppo_clip", "truncated_is")
REDUCTIONS = ("token_mean", "sequence_mean", "sequence_sum")


@dataclass(kw_only=True)
class AlgorithmConfig:
    """How rewards become gradients. Illegal values and combinations are refused with the reason."""

    advantage: str = "grpo"
    """`grpo`: reward minus group mean, over group standard deviation; `dr_grpo`: without the division; `rloo`:
    reward minus the mean of the group's other rows."""
    policy_loss: str = "ppo_clip"
    """`ppo_clip`: clipped surrogate against the rollout's logprobs; `truncated_is`: policy gradient weighted by the
    importance ratio, cut at `importance_cap`."""
    clip_low: float = 0.2
    """The ratio's lower bound is 1 - clip_low (`ppo_clip`)."""
    clip_high: float = 0.2
    """The ratio's upper bound is 1 + clip_high (`ppo_clip`); above clip_low it is DAPO's clip-higher."""
    dual_clip: float | None = None
    """Bound of the loss for negative advantages, in multiples of the advantage (`ppo_clip`); absent: none."""
    importance_cap: float = 2.0
    """Largest weight of a token (`truncated_is`)."""
    reduction: str = "token_mean"
    """`token_mean`: each token of the batch weighs the same; `sequence_mean`: each row; `sequence_sum`: each row
    the sum over its tokens, divided by the number of rows."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in nats; 0: none."""
    kl_coef: float = 0.0
    """Weight of the penalty for leaving the reference, the model that training started from (k3 estimator); 0: none,
    and no reference is kept."""
    kl_cap: float = 3.0
    """Largest log-ratio of reference to policy in the penalty, in nats; beyond it a token has no gradient from it."""

    def __post_init__(self) -> None:
        for key, value, choices in (
            ("advantage", self.advantage, ADVANTAGES),
            ("policy_loss", self.policy_loss, POLICY_LOSSES),
            ("reduction", self.reduction, REDUCTIONS),
        ):
            if value not in choices:
                raise ConfigError(f"algorithm.{key}: must be one of {', '.join(choices)}, got {value!r}")
        if not 0 < self.clip_low < 1:
            raise ConfigError(f"algorithm.clip_low: must be above 0 and below 1, got {self.clip_low}")
        if not (self.clip_high > 0 and math.isfinite(self.clip_high)):
            raise ConfigError(f"algorithm.clip_high: must be above 0, got {self.clip_high}")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ConfigError(
                f"algorithm.dual_clip: must be above 1, got {self.dual_clip}; leave it out for none"
            )
        if self.dual_clip is not None and self.policy_loss != "ppo_clip":
            raise ConfigError(
                f"algorithm.dual_clip: must be absent unless policy_loss is ppo_clip, got {self.dual_clip} "
                f"with {self.policy_loss}"
            )
        if not (self.importance_cap > 0 and math.isfinite(self.importance_cap)):
            raise ConfigError(f"algorithm.importance_cap: must be above 0, got {self.importance_cap}")
        for name, weight in (("entropy_coef", self.entropy_coef), ("kl_coef", self.kl_coef)):
            if not (weight >= 0 and math.isfinite(weight)):
                raise ConfigError(f"algorithm.{name}: must be at least 0, got {weight}")
        if not (self.kl_cap > 0 and math.isfinite(self.kl_cap)):
            raise ConfigError(f"algorithm.kl_cap: must be above 0, got {self.kl_cap}")
