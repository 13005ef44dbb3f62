"""KL estimators against hand-computed numbers and the exact divergence."""

from __future__ import annotations

import math

import pytest
import torch

from relax.algorithms.kl import k1, k2, k3

P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.25, 0.25, 0.5])


def test_estimators_of_one_sample() -> None:
    """p = 0.5, q = 0.25: log ratio log 2."""
    p, q = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert float(k1(p, q)) == pytest.approx(math.log(2))
    assert float(k2(p, q)) == pytest.approx(math.log(2) ** 2 / 2)
    assert float(k3(p, q)) == pytest.approx(0.5 - 1 + math.log(2))


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased(estimator) -> None:
    """Their mean under p is KL(p || q)."""
    exact = (P * (P / Q).log()).sum()
    torch.testing.assert_close((P * estimator(P.log(), Q.log())).sum(), exact)


def test_k2_and_k3_are_never_negative_and_zero_at_equality() -> None:
    """Whatever the two policies say of a token."""
    p, q = torch.randn(100, generator=torch.Generator().manual_seed(0)), torch.zeros(100)
    for estimator in (k2, k3):
        assert (estimator(p, q) >= 0).all()
        assert (estimator(p, p) == 0).all()
