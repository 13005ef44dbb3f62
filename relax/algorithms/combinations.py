"""Combinations of an algorithm's parts that make no sense, each refused with the reason and the way out. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax.errors import ConfigError

if TYPE_CHECKING:
    from relax.algorithms.config import AlgorithmConfig

GROUP_BASELINES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Advantages that are zero where all rewards of a group are equal."""


def check_combination(config: AlgorithmConfig) -> None:
    """Refuse parts that contradict or cancel one another.

    Raises:
        ConfigError: names both parts, why they do not go together, and what to set instead.
    """
    for check in (_check_clips, _check_correction, _check_kl, _check_sampling):
        check(config)


def check_staleness(config: AlgorithmConfig, max_staleness: int) -> None:
    """Refuse a loss that ignores who sampled the rollouts while they may be of older weights.

    Raises:
        ConfigError: the loss needs `correction.weight`, or rollouts of the present weights.
    """
    ignores_rollout = config.policy_loss == "reinforce" or config.proximal == "trainer"
    if max_staleness and ignores_rollout and config.correction.weight == "none":
        cause = "policy_loss=reinforce" if config.policy_loss == "reinforce" else "proximal=trainer"
        raise ConfigError(
            f"algorithm.correction.weight: must be truncate or mask with {cause} and max_staleness={max_staleness}, "
            "got none; the loss would take old rollouts for the policy's own (or set max_staleness=0)"
        )


def _check_clips(config: AlgorithmConfig) -> None:
    if config.dual_clip is not None and config.policy_loss != "ppo_clip":
        raise ConfigError(
            f"algorithm.dual_clip: must be absent unless policy_loss is ppo_clip, got {config.dual_clip} "
            f"with {config.policy_loss}; the others have bounds of their own, or none by design"
        )
    if config.dual_clip is not None and config.dual_clip <= 1 + config.clip_high:
        raise ConfigError(
            f"algorithm.dual_clip: must be above 1 + clip_high={1 + config.clip_high}, got {config.dual_clip}; "
            "inside the clip range no loss is to be cut"
        )
    if config.sequence_norm_tokens is not None and config.reduction != "sequence_sum":
        raise ConfigError(
            "algorithm.sequence_norm_tokens: must be absent unless reduction is sequence_sum, got "
            f"{config.sequence_norm_tokens} with {config.reduction}; the means divide by lengths already"
        )


def _check_correction(config: AlgorithmConfig) -> None:
    weight, loss = config.correction.weight, config.policy_loss
    if weight != "none" and loss != "reinforce" and config.proximal == "rollout":
        raise ConfigError(
            f"algorithm.correction.weight: must be none with policy_loss={loss} and proximal=rollout, got {weight}; "
            "the ratio of trainer to rollout would count twice; set algorithm.proximal=trainer or use correction.reject"
        )
    if loss == "surrogate" and config.proximal == "trainer":
        raise ConfigError(
            "algorithm.proximal: must be rollout with policy_loss=surrogate, got trainer; without a clip the ratio to "
            "the trainer's own logprobs is 1 and does nothing; set algorithm.policy_loss=reinforce for that"
        )


def _check_kl(config: AlgorithmConfig) -> None:
    if not config.kl_coef:
        return
    if config.kl_estimator == "k1" and config.kl_placement == "loss":
        raise ConfigError(
            "algorithm.kl_estimator: must not be k1 with kl_placement=loss; its gradient is zero on average, whatever "
            "the reference; use k2, k3 or unbiased, or set algorithm.kl_placement=reward"
        )
    if config.kl_estimator == "unbiased" and config.kl_placement == "reward":
        raise ConfigError(
            "algorithm.kl_estimator: must not be unbiased with kl_placement=reward; a reward has no gradient that the "
            "ratio could correct; use k1, k2 or k3, or set algorithm.kl_placement=loss"
        )


def _check_sampling(config: AlgorithmConfig) -> None:
    if config.sampling.dynamic and config.advantage not in GROUP_BASELINES:
        raise ConfigError(
            f"algorithm.sampling.dynamic: must be false with advantage={config.advantage}, got true; its baseline is "
            "not the group's, so groups of equal rewards teach too, and to leave them out would bias it; use "
            f"{', '.join(GROUP_BASELINES[:-1])} or {GROUP_BASELINES[-1]}"
        )
