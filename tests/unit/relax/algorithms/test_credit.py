"""From rewards to advantages, by hand."""

from __future__ import annotations

import pytest
import torch

from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.credit import Outcome, assign_credit
from relax.algorithms.sections import CriticConfig, SamplingConfig


def outcome(**changes) -> Outcome:
    """Return one group of two rows, of two tokens and of one, rewards 1 and 0; the reference differs by half a nat."""
    values = {
        "rewards_R": torch.tensor([1.0, 0.0]),
        "groups_R": torch.tensor([0, 0]),
        "num_tokens_R": torch.tensor([2, 1]),
        "row_C": torch.tensor([0, 0, 1]),
        "rollout_logprobs_C": torch.tensor([-1.0, -1.0, -1.0]),
        "ref_logprobs_C": torch.tensor([-1.5, -1.0, -0.5]),
    }
    return Outcome(**values | changes)


def advantages(made: Outcome, **settings) -> list[float]:
    """Return the advantages under some settings."""
    return [round(each, 5) for each in assign_credit(made, AlgorithmConfig(**settings)).advantages_C.tolist()]


IN_REWARD = {"kl_coef": 0.2, "kl_placement": "reward", "kl_estimator": "k1"}
"""k1 is 0.5, 0 and -0.5 nats; the tokens pay 0.1, 0 and -0.1."""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"advantage": "dr_grpo"}, [0.5, 0.5, -0.5]),
        ({"advantage": "rloo"}, [1.0, 1.0, -1.0]),
        ({"advantage": "grpo"}, [0.70711, 0.70711, -0.70711]),
        ({"advantage": "dr_grpo", **IN_REWARD}, [0.4, 0.4, -0.4]),
        ({"advantage": "rloo", **IN_REWARD}, [0.8, 0.8, -0.8]),
        # 1, 1, 0: mean 2/3, deviation sqrt(2)/3
        ({"advantage": "reinforce_plus_plus"}, [0.70711, 0.70711, -1.41421]),
        # 0.9, 1, 0.1: mean 2/3, deviation 0.40277: 0.2333, 0.3333 and -0.5667 of it
        ({"advantage": "reinforce_plus_plus", **IN_REWARD}, [0.57932, 0.82761, -1.40693]),
        # 0.5, 0.5, -0.5: mean 1/6, deviation sqrt(2)/3
        ({"advantage": "reinforce_plus_plus_baseline"}, [0.70711, 0.70711, -1.41421]),
    ],
)
def test_advantages_by_hand(settings, expected) -> None:
    """A penalty in the reward is summed over a row for outcome baselines, and from the token on for REINFORCE++."""
    assert advantages(outcome(), **settings) == pytest.approx(expected, abs=2e-5)


def test_advantages_by_a_critic() -> None:
    """Values 0.5, 0.75, 0.5; lambda and gamma 1: reward to go minus value, with and without the penalty."""
    critic = CriticConfig(whiten=False)
    made = outcome(values_C=torch.tensor([0.5, 0.75, 0.5]))
    assert advantages(made, advantage="gae", critic=critic) == [0.5, 0.25, -0.5]
    assert advantages(made, advantage="gae", critic=critic, **IN_REWARD) == [0.4, 0.25, -0.4]
    credit = assign_credit(made, AlgorithmConfig(advantage="gae", critic=critic))
    assert credit.returns_C.tolist() == [1.0, 1.0, 0.0]
    whitened = assign_credit(made, AlgorithmConfig(advantage="gae")).advantages_C
    assert float(whitened.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(whitened.std(unbiased=False)) == pytest.approx(1.0)


def test_length_costs_before_the_baseline() -> None:
    """Limit 2 and half of it as cache: the row of two tokens loses 1 and is as good as the other."""
    sampling = SamplingConfig(overlong_limit_tokens=2, overlong_part=0.5)
    assert advantages(outcome(), advantage="dr_grpo", sampling=sampling) == [0.0, 0.0, 0.0]


def test_what_is_missing_is_named() -> None:
    """Values for a critic, the reference for a penalty in the reward."""
    with pytest.raises(ValueError, match="values_C must be there with advantage gae, got none"):
        assign_credit(outcome(), AlgorithmConfig(advantage="gae"))
    with pytest.raises(ValueError, match="ref_logprobs_C must be there with kl_placement reward, got none"):
        assign_credit(outcome(ref_logprobs_C=None), AlgorithmConfig(**IN_REWARD))
