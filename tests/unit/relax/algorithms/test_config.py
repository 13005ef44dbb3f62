"""The algorithm's configuration refuses what cannot be, with the reason and the way out."""

from __future__ import annotations

import pytest

from relax.algorithms.advantages import BY_NAME as GROUP_ADVANTAGES
from relax.algorithms.combinations import check_staleness
from relax.algorithms.config import ADVANTAGES, POLICY_LOSSES, AlgorithmConfig
from relax.algorithms.losses import BY_NAME as LOSS_FUNCTIONS
from relax.algorithms.sections import CorrectionConfig, CriticConfig, SamplingConfig
from relax.errors import ConfigError


def message_of(make, *arguments, **settings) -> str:
    """Return what a refusal says."""
    with pytest.raises(ConfigError) as caught:
        make(*arguments, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"advantage": "vtrace"},
            "advantage: must be one of grpo, dr_grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gae, "
            "got 'vtrace'",
        ),
        (
            {"policy_loss": "trpo"},
            "policy_loss: must be one of ppo_clip, gspo, cispo, sapo, surrogate, reinforce, got 'trpo'",
        ),
        ({"proximal": "old"}, "proximal: must be one of rollout, trainer, got 'old'"),
        (
            {"reduction": "sum"},
            "reduction: must be one of token_mean, sequence_mean, sequence_sum, got 'sum'",
        ),
        ({"kl_estimator": "k4"}, "kl_estimator: must be one of k1, k2, k3, unbiased, got 'k4'"),
        ({"kl_placement": "both"}, "kl_placement: must be one of loss, reward, got 'both'"),
        ({"clip_low": 1.5}, "clip_low: must be above 0 and at most 1, got 1.5"),
        ({"clip_high": float("inf")}, "clip_high: must be above 0, got inf"),
        ({"dual_clip": 1.0}, "dual_clip: must be above 1, or absent for none, got 1.0"),
        ({"gate_negative": 0.0}, "gate_negative: must be above 0, got 0.0"),
        ({"entropy_coef": float("nan")}, "entropy_coef: must be at least 0, got nan"),
        ({"kl_coef": -0.1}, "kl_coef: must be at least 0, got -0.1"),
        ({"kl_cap": 0.0}, "kl_cap: must be above 0, got 0.0"),
        (
            {"sequence_norm_tokens": -1},
            "sequence_norm_tokens: must be at least 1, or absent for no division, got -1",
        ),
    ],
)
def test_algorithm_config_refuses_what_cannot_be(settings, message) -> None:
    """The key, the rule and the value are said."""
    assert message_of(AlgorithmConfig, **settings) == f"algorithm.{message}"


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        (
            CorrectionConfig,
            {"weight": "clip"},
            "correction.weight: must be one of none, truncate, mask, got 'clip'",
        ),
        (
            CorrectionConfig,
            {"weight_level": "row"},
            "correction.weight_level: must be one of token, sequence, geometric, got 'row'",
        ),
        (
            CorrectionConfig,
            {"reject": "row"},
            "correction.reject: must be one of none, token, sequence, geometric, got 'row'",
        ),
        (CorrectionConfig, {"weight_low": -1.0}, "correction.weight_low: must be at least 0, got -1.0"),
        (
            CorrectionConfig,
            {"reject_high": 0.2},
            "correction.reject_high: must be above reject_low=0.5, got 0.2",
        ),
        (
            CorrectionConfig,
            {"opsm_delta": 0.0},
            "correction.opsm_delta: must be above 0, or absent for none, got 0.0",
        ),
        (
            CorrectionConfig,
            {"m2_budget": -0.04},
            "correction.m2_budget: must be above 0, or absent for none, got -0.04",
        ),
        (CriticConfig, {"discount": 0.0}, "critic.discount: must be above 0 and at most 1, got 0.0"),
        (CriticConfig, {"gae_lambda": 1.1}, "critic.gae_lambda: must be from 0 to 1, got 1.1"),
        (
            CriticConfig,
            {"value_clip": 0.0},
            "critic.value_clip: must be above 0, or absent for none, got 0.0",
        ),
        (CriticConfig, {"value_coef": 0.0}, "critic.value_coef: must be above 0, got 0.0"),
        (CriticConfig, {"lr": float("nan")}, "critic.lr: must be above 0, got nan"),
        (SamplingConfig, {"max_refills": -1}, "sampling.max_refills: must be at least 0, got -1"),
        (SamplingConfig, {"overlong_part": 1.5}, "sampling.overlong_part: must be from 0 to 1, got 1.5"),
        (
            SamplingConfig,
            {"overlong_penalty": -1.0},
            "sampling.overlong_penalty: must be at least 0, got -1.0",
        ),
        (
            SamplingConfig,
            {"overlong_limit_tokens": 0},
            "sampling.overlong_limit_tokens: must be at least 1, got 0",
        ),
        (
            SamplingConfig,
            {"overlong_part": 0.2},
            "sampling.overlong_limit_tokens: must be given with overlong_part=0.2, got none; set it to "
            "${rollout.max_new_tokens}",
        ),
    ],
)
def test_sections_refuse_what_cannot_be(section, settings, message) -> None:
    """The same for the parts of the section."""
    assert message_of(section, **settings) == f"algorithm.{message}"


WEIGHT = CorrectionConfig(weight="truncate")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"dual_clip": 3.0, "policy_loss": "cispo"},
            "dual_clip: must be absent unless policy_loss is ppo_clip, got 3.0 with cispo; the others have bounds of "
            "their own, or none by design",
        ),
        (
            {"dual_clip": 1.2},
            "dual_clip: must be above 1 + clip_high=1.2, got 1.2; inside the clip range no loss is to be cut",
        ),
        (
            {"sequence_norm_tokens": 8},
            "sequence_norm_tokens: must be absent unless reduction is sequence_sum, got 8 with token_mean; the means "
            "divide by lengths already",
        ),
        (
            {"correction": WEIGHT},
            "correction.weight: must be none with policy_loss=ppo_clip and proximal=rollout, got truncate; the ratio "
            "of trainer to rollout would count twice; set algorithm.proximal=trainer or use correction.reject",
        ),
        (
            {"policy_loss": "surrogate", "proximal": "trainer"},
            "proximal: must be rollout with policy_loss=surrogate, got trainer; without a clip the ratio to the "
            "trainer's own logprobs is 1 and does nothing; set algorithm.policy_loss=reinforce for that",
        ),
        (
            {"kl_coef": 0.1, "kl_estimator": "k1"},
            "kl_estimator: must not be k1 with kl_placement=loss; its gradient is zero on average, whatever the "
            "reference; use k2, k3 or unbiased, or set algorithm.kl_placement=reward",
        ),
        (
            {"kl_coef": 0.1, "kl_estimator": "unbiased", "kl_placement": "reward"},
            "kl_estimator: must not be unbiased with kl_placement=reward; a reward has no gradient that the ratio "
            "could correct; use k1, k2 or k3, or set algorithm.kl_placement=loss",
        ),
        (
            {"advantage": "gae", "sampling": SamplingConfig(dynamic=True)},
            "sampling.dynamic: must be false with advantage=gae, got true; its baseline is not the group's, so groups "
            "of equal rewards teach too, and to leave them out would bias it; use grpo, dr_grpo, rloo or "
            "reinforce_plus_plus_baseline",
        ),
    ],
)
def test_combinations_that_make_no_sense_are_refused(settings, message) -> None:
    """With the reason and the way out."""
    assert message_of(AlgorithmConfig, **settings) == f"algorithm.{message}"


@pytest.mark.parametrize(
    "settings",
    [
        {"correction": WEIGHT, "proximal": "trainer"},
        {"correction": WEIGHT, "policy_loss": "reinforce"},
        {"correction": CorrectionConfig(reject="geometric", opsm_delta=0.1, m2_budget=0.04)},
        {"dual_clip": 3.0, "clip_high": 0.28},
        {"kl_coef": 0.1, "kl_estimator": "k1", "kl_placement": "reward"},
        {"kl_estimator": "k1"},
    ],
)
def test_combinations_that_make_sense_are_not(settings) -> None:
    """Each refusal's way out is one."""
    assert AlgorithmConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "cause"),
    [({"policy_loss": "reinforce"}, "policy_loss=reinforce"), ({"proximal": "trainer"}, "proximal=trainer")],
)
def test_old_rollouts_need_a_correction(settings, cause) -> None:
    """Unless they are weighted, or there are none."""
    assert message_of(check_staleness, AlgorithmConfig(**settings), 2) == (
        f"algorithm.correction.weight: must be truncate or mask with {cause} and max_staleness=2, got none; the loss "
        "would take old rollouts for the policy's own (or set max_staleness=0)"
    )
    check_staleness(AlgorithmConfig(**settings), 0)
    check_staleness(AlgorithmConfig(**settings, correction=WEIGHT), 2)
    check_staleness(AlgorithmConfig(), 2)


def test_every_choice_has_its_function() -> None:
    """The names of the configuration are those of the functions."""
    others = {"reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"}
    assert {*GROUP_ADVANTAGES, *others} == {*ADVANTAGES}
    assert tuple(LOSS_FUNCTIONS) == POLICY_LOSSES
