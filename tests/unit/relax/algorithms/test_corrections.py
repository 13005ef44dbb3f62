"""Corrections against hand-computed numbers."""

from __future__ import annotations

import math

import pytest
import torch

from relax.algorithms.corrections import correct
from relax.algorithms.sections import CorrectionConfig
from tests.kit.tokens import log

ROWS = torch.tensor([0, 0, 1, 1])
RATIOS = log(0.1, 4.0, 3.0, 3.0)
"""Products 0.4 and 9; geometric means sqrt(0.4) and 3."""


def made(advantages: tuple[float, ...] = (1.0,) * 4, mask=None, **settings):
    """Return weights and counts, as lists, under some settings."""
    rollout = torch.full((4,), -2.0)
    result = correct(
        RATIOS + rollout, rollout, torch.tensor(advantages), ROWS, CorrectionConfig(**settings), mask
    )
    return [round(each, 4) for each in result.weight_N.tolist()], result.counts_N.tolist()


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0]),
        ({"weight": "truncate"}, [0.1, 2.0, 2.0, 2.0]),
        ({"weight": "truncate", "weight_low": 0.5, "weight_high": 3.5}, [0.5, 3.5, 3.0, 3.0]),
        ({"weight": "truncate", "weight_level": "sequence"}, [0.4, 0.4, 2.0, 2.0]),
        ({"weight": "truncate", "weight_level": "geometric"}, [0.6325, 0.6325, 2.0, 2.0]),
        ({"weight": "mask", "weight_low": 0.5, "weight_high": 5.0}, [0.0, 4.0, 3.0, 3.0]),
        ({"weight": "mask", "weight_level": "sequence"}, [0.4, 0.4, 0.0, 0.0]),
        ({"weight": "mask", "weight_level": "geometric", "weight_high": 3.1}, [0.6325, 0.6325, 3.0, 3.0]),
    ],
)
def test_weights_at_each_level(settings, weights) -> None:
    """Truncated and masked importance sampling of tokens, rows and average tokens; a mask of tokens is IcePop."""
    got, counts = made(**settings)
    assert got == weights
    assert counts == [True] * 4


@pytest.mark.parametrize(
    ("level", "low", "high", "counts"),
    [
        ("token", 0.5, 3.5, [False, False, True, True]),
        ("sequence", 0.3, 2.0, [True, True, False, False]),
        ("geometric", 0.7, 3.5, [False, False, True, True]),
    ],
)
def test_rejection_at_each_level(level, low, high, counts) -> None:
    """What is outside the band does not count; weights are as they were."""
    assert made(reject=level, reject_low=low, reject_high=high) == ([1.0] * 4, counts)


def test_opsm_leaves_out_bad_rows_that_the_policy_has_left() -> None:
    """Row 0 is less likely than it was by 0.458 nats a token, and goes if it was bad; row 1 never does."""
    bad = (-1.0,) * 4
    assert made(bad, opsm_delta=0.45)[1] == [False, False, True, True]
    assert made(bad, opsm_delta=0.46)[1] == [True] * 4
    assert made(opsm_delta=0.01)[1] == [True] * 4


def test_parts_combine() -> None:
    """A weight per token, geometric rejection and OPSM at once."""
    settings = {"weight": "truncate", "reject": "geometric", "reject_high": 2.9, "opsm_delta": 0.1}
    assert made((1.0, 1.0, 1.0, 1.0), **settings) == ([0.1, 2.0, 2.0, 2.0], [True, True, False, False])
    assert made((-1.0, -1.0, 1.0, 1.0), **settings)[1] == [False] * 4


def test_weight_has_no_gradient_and_masked_tokens_do_not_count_in_their_row() -> None:
    """Row 0 without its second token is 0.1."""
    mask = torch.tensor([True, False, True, True])
    assert made(mask=mask, weight="truncate", weight_level="geometric")[0] == [0.1, 0.1, 2.0, 2.0]
    trainer = torch.tensor([-1.0, math.nan, -1.0, -1.0], requires_grad=True)
    config = CorrectionConfig(weight="truncate", weight_level="sequence")
    result = correct(trainer, torch.full((4,), -1.0), torch.ones(4), ROWS, config, mask)
    assert result.weight_N.tolist() == [1.0] * 4
    assert not result.weight_N.requires_grad
