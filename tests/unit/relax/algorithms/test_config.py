"""The algorithm's configuration refuses what cannot be, with the reason."""

from __future__ import annotations

import pytest

from relax.algorithms.advantages import BY_NAME as ADVANTAGE_FUNCTIONS
from relax.algorithms.config import ADVANTAGES, POLICY_LOSSES, AlgorithmConfig
from relax.algorithms.losses import BY_NAME as LOSS_FUNCTIONS
from relax.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "gae"}, "algorithm.advantage: must be one of grpo, dr_grpo, rloo, got 'gae'"),
        (
            {"reduction": "sum"},
            "algorithm.reduction: must be one of token_mean, sequence_mean, sequence_sum, got 'sum'",
        ),
        ({"clip_low": 1.0}, "algorithm.clip_low: must be above 0 and below 1, got 1.0"),
        ({"clip_high": float("inf")}, "algorithm.clip_high: must be above 0, got inf"),
        ({"dual_clip": 1.0}, "algorithm.dual_clip: must be above 1, got 1.0; leave it out for none"),
        (
            {"dual_clip": 3.0, "policy_loss": "truncated_is"},
            "algorithm.dual_clip: must be absent unless policy_loss is ppo_clip, got 3.0 with truncated_is",
        ),
        ({"importance_cap": 0.0}, "algorithm.importance_cap: must be above 0, got 0.0"),
        ({"entropy_coef": float("nan")}, "algorithm.entropy_coef: must be at least 0, got nan"),
    ],
)
def test_algorithm_config_refuses_what_cannot_be(settings, message) -> None:
    """The key, the rule and the value are said."""
    with pytest.raises(ConfigError) as caught:
        AlgorithmConfig(**settings)
    assert str(caught.value) == message


def test_every_choice_has_its_function() -> None:
    """The names of the configuration are those of the functions."""
    assert tuple(ADVANTAGE_FUNCTIONS) == ADVANTAGES
    assert tuple(LOSS_FUNCTIONS) == POLICY_LOSSES
