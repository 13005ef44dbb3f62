"""Parts of the algorithm's configuration: corrections, critic and sampling. It computes nothing, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from relax.errors import ConfigError

WEIGHTS = ("none", "truncate", "mask")
LEVELS = ("token", "sequence", "geometric")
REJECTIONS = ("none", *LEVELS)


@dataclass(kw_only=True)
class CorrectionConfig:
    """What is done about rollouts that another policy, or another arithmetic, sampled. All ratios are trainer/rollout.

    A weight multiplies the policy loss. A rejected token counts nothing, and its share of the mean is not given to
    others. Levels: `token`; `sequence`, the product over a row's tokens; `geometric`, their geometric mean.
    """

    weight: str = "none"
    """`none`; `truncate`: the ratio cut to [weight_low, weight_high]; `mask`: the ratio inside that band, else 0 (at
    level `token` it is IcePop)."""
    weight_level: str = "token"
    """Which ratio the weight is made of."""
    weight_low: float = 0.0
    """Lower bound of the weight."""
    weight_high: float = 2.0
    """Upper bound of the weight; also that of stale tokens under `staleness_policy=reweight`."""
    reject: str = "none"
    """Level of the ratio that decides whether a token counts at all; `none`: all count."""
    reject_low: float = 0.5
    """Smallest ratio that counts."""
    reject_high: float = 2.0
    """Largest ratio that counts."""
    opsm_delta: float | None = None
    """Rows of negative advantage are left out when rollout minus trainer logprob is more than this on average, in nats;
    absent: none are."""
    m2_budget: float | None = None
    """Largest mean of the squared log-ratio over the batch; the tokens furthest off are left out until it holds.
    Absent: no bound. Costs one more forward pass."""

    def __post_init__(self) -> None:
        where = "algorithm.correction"
        check_choice(f"{where}.weight", self.weight, WEIGHTS)
        check_choice(f"{where}.weight_level", self.weight_level, LEVELS)
        check_choice(f"{where}.reject", self.reject, REJECTIONS)
        for name in ("weight", "reject"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            check_number(f"{where}.{name}_low", low, low >= 0, "at least 0")
            check_number(f"{where}.{name}_high", high, high > low, f"above {name}_low={low}")
        for name in ("opsm_delta", "m2_budget"):
            bound = getattr(self, name)
            if bound is not None:
                check_number(f"{where}.{name}", bound, bound > 0, "above 0, or absent for none")


@dataclass(kw_only=True)
class CriticConfig:
    """The value model of `advantage: gae`: a linear head on the policy's last hidden states."""

    discount: float = 1.0
    """Gamma: what a token later is worth now."""
    gae_lambda: float = 1.0
    """Lambda: 1 trusts the rewards alone, 0 the values alone."""
    whiten: bool = True
    """Shift and scale the batch's advantages to mean 0 and deviation 1."""
    value_clip: float | None = 0.2
    """Furthest that a value may move from what it was before the step without losing its gradient; absent: any."""
    value_coef: float = 0.5
    """Weight of the value loss. It matters only with `trunk_gradient`; the head has an optimizer of its own."""
    lr: float = 1e-2
    """Learning rate of the head."""
    trunk_gradient: bool = False
    """Let the value loss train the policy's layers too."""

    def __post_init__(self) -> None:
        where = "algorithm.critic"
        check_number(f"{where}.discount", self.discount, 0 < self.discount <= 1, "above 0 and at most 1")
        check_number(f"{where}.gae_lambda", self.gae_lambda, 0 <= self.gae_lambda <= 1, "from 0 to 1")
        if self.value_clip is not None:
            check_number(
                f"{where}.value_clip", self.value_clip, self.value_clip > 0, "above 0, or absent for none"
            )
        check_number(f"{where}.value_coef", self.value_coef, self.value_coef > 0, "above 0")
        check_number(f"{where}.lr", self.lr, self.lr > 0, "above 0")


@dataclass(kw_only=True)
class SamplingConfig:
    """Which groups are trained on, and what length costs."""

    dynamic: bool = False
    """Leave out groups whose rewards are all equal, and take others in their place."""
    max_refills: int = 4
    """Takes after the first one by which a batch is filled up (`dynamic`); then it is trained on as it is."""
    overlong_limit_tokens: int | None = None
    """Longest completion, `rollout.max_new_tokens` as a rule; needed with `overlong_part`."""
    overlong_part: float = 0.0
    """Last part of the limit in which the penalty grows from 0 to `overlong_penalty`; 0: length costs nothing."""
    overlong_penalty: float = 1.0
    """What the longest completion loses, in units of reward."""

    def __post_init__(self) -> None:
        where = "algorithm.sampling"
        check_number(f"{where}.max_refills", self.max_refills, self.max_refills >= 0, "at least 0")
        check_number(
            f"{where}.overlong_part", self.overlong_part, 0 <= self.overlong_part <= 1, "from 0 to 1"
        )
        check_number(
            f"{where}.overlong_penalty", self.overlong_penalty, self.overlong_penalty >= 0, "at least 0"
        )
        limit = self.overlong_limit_tokens
        if limit is not None:
            check_number(f"{where}.overlong_limit_tokens", limit, limit >= 1, "at least 1")
        if self.overlong_part and limit is None:
            raise ConfigError(
                f"{where}.overlong_limit_tokens: must be given with overlong_part={self.overlong_part}, got none; "
                "set it to ${rollout.max_new_tokens}"
            )


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a word that is not among the choices.

    Raises:
        ConfigError: it is not.
    """
    if value not in choices:
        raise ConfigError(f"{key}: must be one of {', '.join(choices)}, got {value!r}")


def check_number(key: str, value: float, holds: bool, rule: str) -> None:
    """Refuse a number for which the rule does not hold, or that is not finite.

    Raises:
        ConfigError: it does not.
    """
    if not (holds and math.isfinite(value)):
        raise ConfigError(f"{key}: must be {rule}, got {value}")
