"""From rewards to the advantage of every token: shaping, penalties in the reward, baselines, critic.

    reward of a row = reward - overlong penalty;   with kl_placement `reward` each token also pays kl_coef * KL_t
    grpo, dr_grpo, rloo             A_t = baseline(row's whole reward), the same for all its tokens
    reinforce_plus_plus             A_t = whiten(R - kl_coef * sum_{i >= t} KL_i)
    reinforce_plus_plus_baseline    A_t = whiten(R - mean of the group)
    gae                             see `relax.algorithms.gae`; the reward is that of the last token

Groups must be whole; with several ranks, a group is on one of them, and `all_sum` adds up what is whitened.

Source: REINFORCE++ (arXiv:2501.03262), global advantage normalization, and its variant with baseline; the others as
named. KL_t is taken between the policy that sampled and the reference.

Shapes: R rows, C tokens (of all rows, row after row).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relax.algorithms import advantages, kl
from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.gae import gae
from relax.algorithms.sampling import overlong_penalties
from relax.algorithms.whitening import AllSum, whiten

WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Advantages that are always scaled over the batch."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the rows of a batch brought."""

    rewards_R: Tensor
    groups_R: Tensor
    num_tokens_R: Tensor
    row_C: Tensor
    """Row of each token."""
    rollout_logprobs_C: Tensor
    ref_logprobs_C: Tensor | None = None
    """Needed with a penalty in the reward."""
    values_C: Tensor | None = None
    """Needed by `gae`; no gradient."""


@dataclass(frozen=True, kw_only=True)
class Credit:
    """Advantages of all tokens; returns where a critic learns."""

    advantages_C: Tensor
    returns_C: Tensor | None = None


def assign_credit(outcome: Outcome, config: AlgorithmConfig, all_sum: AllSum | None = None) -> Credit:
    """Return the advantage of every token.

    Raises:
        ValueError: values or reference logprobs are needed and not there.
    """
    credit = raw_credit(outcome, config)
    return replace(credit, advantages_C=whitened(credit.advantages_C, config, all_sum))


def raw_credit(outcome: Outcome, config: AlgorithmConfig) -> Credit:
    """Return the advantage of every token before it is whitened, which needs nothing but the tokens' own group.

    Raises:
        ValueError: values or reference logprobs are needed and not there.
    """
    row_C = outcome.row_C
    rewards_R = shaped_rewards(outcome, config)
    penalty_C = _penalty(outcome, config)
    if config.advantage == "gae":
        return _by_critic(outcome, config, rewards_R, penalty_C)
    if config.advantage == "reinforce_plus_plus":
        return Credit(advantages_C=rewards_R[row_C] - _sum_to_end(penalty_C, row_C))
    whole_R = rewards_R.index_add(0, row_C, -penalty_C)
    if config.advantage == "reinforce_plus_plus_baseline":
        return Credit(advantages_C=advantages.dr_grpo(whole_R, outcome.groups_R)[row_C])
    return Credit(advantages_C=advantages.BY_NAME[config.advantage](whole_R, outcome.groups_R)[row_C])


def whitened(advantages_C: Tensor, config: AlgorithmConfig, all_sum: AllSum | None = None) -> Tensor:
    """Return the advantages as the loss weighs tokens with them: scaled over the batch if the algorithm says so."""
    is_scaled = config.critic.whiten if config.advantage == "gae" else config.advantage in WHITENED
    return whiten(advantages_C, all_sum=all_sum) if is_scaled else advantages_C


def shaped_rewards(outcome: Outcome, config: AlgorithmConfig) -> Tensor:
    """Return the rows' rewards less what their length costs."""
    sampling = config.sampling
    if not sampling.overlong_part or sampling.overlong_limit_tokens is None:
        return outcome.rewards_R
    penalties = overlong_penalties(
        outcome.num_tokens_R.numpy(),
        sampling.overlong_limit_tokens,
        sampling.overlong_part,
        sampling.overlong_penalty,
    )
    return outcome.rewards_R + torch.from_numpy(penalties)


def _penalty(outcome: Outcome, config: AlgorithmConfig) -> Tensor:
    """Return what each token pays for leaving the reference, in units of reward."""
    rollout_C = outcome.rollout_logprobs_C
    if not config.kl_coef or config.kl_placement != "reward":
        return torch.zeros_like(rollout_C)
    if outcome.ref_logprobs_C is None:
        raise ValueError("assign_credit: ref_logprobs_C must be there with kl_placement reward, got none")
    estimate_C = kl.reference_penalty(
        rollout_C, outcome.ref_logprobs_C, rollout_C, config.kl_estimator, config.kl_cap
    )
    return config.kl_coef * estimate_C


def _by_critic(outcome: Outcome, config: AlgorithmConfig, rewards_R: Tensor, penalty_C: Tensor) -> Credit:
    if outcome.values_C is None:
        raise ValueError("assign_credit: values_C must be there with advantage gae, got none")
    last_R = outcome.num_tokens_R.cumsum(0) - 1
    token_rewards_C = (-penalty_C).index_add(0, last_R, rewards_R)
    critic = config.critic
    made = gae(token_rewards_C, outcome.values_C, outcome.row_C, critic.discount, critic.gae_lambda)
    return Credit(advantages_C=made.advantages_N, returns_C=made.returns_N)


def _sum_to_end(values_C: Tensor, row_C: Tensor) -> Tensor:
    """Return for each token the sum from it to the end of its row."""
    exact_C = values_C.double()
    up_to_C = exact_C.cumsum(0)
    num_rows = int(row_C.max()) + 1
    total_up_to_R = exact_C.new_zeros(num_rows).index_add(0, row_C, exact_C).cumsum(0)
    return (total_up_to_R[row_C] - up_to_C + exact_C).to(values_C.dtype)
