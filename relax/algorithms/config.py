"""The choice of algorithm and its numbers. It computes nothing and imports no torch.

Named combinations are in `conf/algorithm/`; which combinations make no sense is in `relax.algorithms.combinations`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from relax.algorithms.combinations import check_combination
from relax.algorithms.sections import (
    CorrectionConfig,
    CriticConfig,
    SamplingConfig,
    check_choice,
    check_number,
)

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")
POLICY_LOSSES = ("ppo_clip", "gspo", "cispo", "sapo", "surrogate", "reinforce")
PROXIMALS = ("rollout", "trainer")
REDUCTIONS = ("token_mean", "sequence_mean", "sequence_sum")
KL_ESTIMATORS = ("k1", "k2", "k3", "unbiased")
KL_PLACEMENTS = ("loss", "reward")
KEPT_BY_PRESETS = ("entropy_coef", "kl_coef", "kl_cap", "critic")
"""Fields that depend on the problem rather than on the algorithm: `algorithm=NAME` does not set them back."""


@dataclass(kw_only=True)
class AlgorithmConfig:
    """How rewards become gradients. Illegal values and combinations are refused with the reason."""

    name: str = "grpo"
    """Preset that the values below started from, a mere label: `algorithm=NAME` chooses a file of `conf/algorithm/`."""
    advantage: str = "grpo"
    """`grpo`: reward minus group mean, over group standard deviation; `dr_grpo`: without the division; `rloo`: reward
    minus the mean of the group's other rows; `reinforce_plus_plus`: reward, scaled over the batch;
    `reinforce_plus_plus_baseline`: reward minus group mean, scaled over the batch; `gae`: by a critic."""
    policy_loss: str = "ppo_clip"
    """`ppo_clip`: clipped ratio; `gspo`: clipped ratio of whole rows; `cispo`: clipped ratio as a mere weight; `sapo`:
    ratio under a soft gate; `surrogate`: ratio as it is; `reinforce`: no ratio."""
    proximal: str = "rollout"
    """What the ratio is against: `rollout`: the logprobs of the rollout; `trainer`: those of the trainer before the
    step (decoupled, the way from rollout to trainer being left to `correction`)."""
    clip_low: float = 0.2
    """The ratio's lower bound is 1 - clip_low (`ppo_clip`, `gspo`, `cispo`); 1: none."""
    clip_high: float = 0.2
    """The ratio's upper bound is 1 + clip_high (`ppo_clip`, `gspo`, `cispo`); above clip_low: DAPO's clip-higher."""
    dual_clip: float | None = None
    """Bound of the loss for negative advantages, in multiples of the advantage (`ppo_clip`); absent: none."""
    gate_positive: float = 1.0
    """Steepness of the soft gate for positive advantages (`sapo`)."""
    gate_negative: float = 1.05
    """Steepness of the soft gate for negative advantages (`sapo`)."""
    reduction: str = "token_mean"
    """`token_mean`: each token of the batch weighs the same; `sequence_mean`: each row; `sequence_sum`: each row
    the sum over its tokens, divided by the number of rows and by `sequence_norm_tokens`."""
    sequence_norm_tokens: int | None = None
    """Constant length that `sequence_sum` divides by; absent: 1."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in nats; 0: none."""
    kl_coef: float = 0.0
    """Weight of the penalty for leaving the reference, the model that training started from; 0: none, and no reference
    is kept."""
    kl_estimator: str = "k3"
    """`k1`: log-ratio (in the reward only); `k2`: half its square; `k3`: low variance, never negative; `unbiased`: k3
    under the importance ratio (in the loss only)."""
    kl_placement: str = "loss"
    """`loss`: a term of each token's loss; `reward`: taken off each token's reward."""
    kl_cap: float = 3.0
    """Largest log-ratio of reference to policy in the penalty, in nats; beyond it a token has no gradient from it."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        for key, word, choices in (
            ("advantage", self.advantage, ADVANTAGES),
            ("policy_loss", self.policy_loss, POLICY_LOSSES),
            ("proximal", self.proximal, PROXIMALS),
            ("reduction", self.reduction, REDUCTIONS),
            ("kl_estimator", self.kl_estimator, KL_ESTIMATORS),
            ("kl_placement", self.kl_placement, KL_PLACEMENTS),
        ):
            check_choice(f"algorithm.{key}", word, choices)
        low, dual, norm = self.clip_low, self.dual_clip, self.sequence_norm_tokens
        for key, value, holds, rule in (
            ("clip_low", low, 0 < low <= 1, "above 0 and at most 1"),
            ("clip_high", self.clip_high, self.clip_high > 0, "above 0"),
            ("gate_positive", self.gate_positive, self.gate_positive > 0, "above 0"),
            ("gate_negative", self.gate_negative, self.gate_negative > 0, "above 0"),
            ("entropy_coef", self.entropy_coef, self.entropy_coef >= 0, "at least 0"),
            ("kl_coef", self.kl_coef, self.kl_coef >= 0, "at least 0"),
            ("kl_cap", self.kl_cap, self.kl_cap > 0, "above 0"),
            ("dual_clip", dual or 2.0, dual is None or dual > 1, "above 1, or absent for none"),
            (
                "sequence_norm_tokens",
                norm or 1,
                norm is None or norm >= 1,
                "at least 1, or absent for no division",
            ),
        ):
            check_number(f"algorithm.{key}", value, holds, rule)
        check_combination(self)

    @property
    def has_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def has_late_credit(self) -> bool:
        """Whether advantages need values or the reference's logprobs, beyond the rewards."""
        return self.has_critic or (self.kl_coef > 0 and self.kl_placement == "reward")
