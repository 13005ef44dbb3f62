"""The second-moment bound against hand-computed numbers."""

from __future__ import annotations

import pytest
import torch

from relax.algorithms.m2po import second_moment_mask

LOG_RATIOS = torch.tensor([0.1, -0.4, 0.2, 0.0, 0.3])
"""Squares 0.01, 0.16, 0.04, 0, 0.09; sorted running means 0, 0.005, 0.01667, 0.035, 0.06."""


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (0.07, [True, True, True, True, True]),
        (0.04, [True, False, True, True, True]),
        (0.02, [True, False, True, True, False]),
        (0.001, [False, False, False, True, False]),
    ],
)
def test_furthest_tokens_go_until_the_mean_fits(budget, kept) -> None:
    """Both directions count alike."""
    assert second_moment_mask(LOG_RATIOS, budget).tolist() == kept


def test_equal_tokens_go_together_and_none_may_be_left() -> None:
    """Two tokens of 0.3: the budget would allow one of them, and which must not be chance."""
    assert second_moment_mask(torch.tensor([0.0, 0.3, -0.3]), 0.05).tolist() == [True, False, False]
    assert second_moment_mask(torch.tensor([1.0, 1.0]), 0.04).tolist() == [False, False]


def test_masked_tokens_neither_count_nor_come_back() -> None:
    """NaN at a masked place changes nothing."""
    log_ratios = torch.tensor([0.1, float("nan"), 0.4])
    mask = torch.tensor([True, False, True])
    assert second_moment_mask(log_ratios, 0.04, mask).tolist() == [True, False, False]
    assert second_moment_mask(log_ratios, 0.09, mask).tolist() == [True, False, True]
    assert second_moment_mask(log_ratios[:0], 0.04).tolist() == []


def test_ranks_that_gather_choose_as_one_process() -> None:
    """Each part alone would choose otherwise."""
    whole = torch.tensor([0.1, -0.4, 0.2, 0.0, 0.3, 0.5])
    expected = second_moment_mask(whole, 0.04)
    parts = [second_moment_mask(part, 0.04, whole_M=whole) for part in (whole[:4], whole[4:])]
    assert torch.equal(torch.cat(parts), expected)
    assert not torch.equal(
        torch.cat([second_moment_mask(part, 0.04) for part in (whole[:4], whole[4:])]), expected
    )
