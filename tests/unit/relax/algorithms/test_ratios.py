"""Ratios and their levels."""

from __future__ import annotations

import math

import pytest
import torch

from relax.algorithms.ratios import at_level, log_ratio, ratio, row_mean, row_sum

ROWS = torch.tensor([0, 0, 1])


def test_ratio_cannot_overflow() -> None:
    """Differences are cut at 20 nats either way."""
    made = ratio(torch.tensor([0.5, 500.0, -500.0]))
    torch.testing.assert_close(made, torch.tensor([0.5, 20.0, -20.0]).exp())


def test_log_ratio_of_a_masked_token_is_zero_without_gradient() -> None:
    """Infinity on both sides would be NaN."""
    new = torch.tensor([1.0, -math.inf], requires_grad=True)
    made = log_ratio(new, torch.tensor([0.5, -math.inf]), torch.tensor([True, False]))
    made.sum().backward()
    assert made.tolist() == [0.5, 0.0]
    assert new.grad.tolist() == [1.0, 0.0]


def test_levels_are_token_sum_and_mean_of_the_row() -> None:
    """Rows of two tokens and of one."""
    values = torch.tensor([1.0, 3.0, 5.0])
    assert at_level(values, ROWS, None, "token").tolist() == [1.0, 3.0, 5.0]
    assert at_level(values, ROWS, None, "sequence").tolist() == [4.0, 4.0, 5.0]
    assert at_level(values, ROWS, None, "geometric").tolist() == [2.0, 2.0, 5.0]
    with pytest.raises(ValueError, match="level must be token, sequence or geometric, got 'row'"):
        at_level(values, ROWS, None, "row")


def test_row_mean_counts_unmasked_tokens_only() -> None:
    """A row without any is 0."""
    mask = torch.tensor([True, False, False])
    assert row_mean(torch.tensor([4.0, 0.0, 0.0]), ROWS, mask).tolist() == [4.0, 4.0, 0.0]
    assert row_sum(torch.zeros(0), torch.zeros(0, dtype=torch.long)).tolist() == []
