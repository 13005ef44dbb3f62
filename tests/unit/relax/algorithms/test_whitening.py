"""Whitening against hand-computed numbers, masks and ranks."""

from __future__ import annotations

import torch

from relax.algorithms.whitening import whiten


def test_whitened_values_have_mean_zero_and_deviation_one() -> None:
    """1, 2, 3, 4, 5: mean 3, deviation sqrt 2."""
    made = whiten(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    torch.testing.assert_close(made, torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]) / 2**0.5)


def test_masked_values_do_not_count() -> None:
    """NaN at a masked place is 0 afterwards."""
    made = whiten(torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([True, False, True]))
    assert made.tolist() == [-1.0, 0.0, 1.0]


def test_values_without_spread_are_zero() -> None:
    """Equal values, one value, none."""
    assert whiten(torch.full((7,), 0.1)).abs().max() == 0
    assert whiten(torch.tensor([5.0])).tolist() == [0.0]
    assert whiten(torch.zeros(2), torch.zeros(2, dtype=torch.bool)).tolist() == [0.0, 0.0]


def test_parts_of_a_batch_whiten_as_the_whole() -> None:
    """Two ranks that add up their sums get what one would."""
    whole = torch.randn(20, generator=torch.Generator().manual_seed(0)) + 100.0
    seen: list[torch.Tensor] = []

    def remember(sums: torch.Tensor) -> torch.Tensor:
        seen.append(sums)
        return sums

    parts = whole.split(13)
    for part in parts:
        whiten(part, all_sum=remember)
    total = sum(seen)
    made = torch.cat([whiten(part, all_sum=lambda _: total) for part in parts])
    torch.testing.assert_close(made, whiten(whole), atol=1e-6, rtol=0)
