"""KL estimators against hand-computed numbers, the exact divergence and finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from relax.algorithms.kl import k1, k2, k3, reference_penalty, unbiased
from tests.kit.tokens import finite_difference, gradient

P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.25, 0.25, 0.5])
LOG2 = math.log(2)


def test_estimators_of_one_sample() -> None:
    """p = 0.5, q = 0.25: log ratio log 2; sampled with 0.25, p is worth twice."""
    p, q = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert float(k1(p, q)) == pytest.approx(LOG2)
    assert float(k2(p, q)) == pytest.approx(LOG2**2 / 2)
    assert float(k3(p, q)) == pytest.approx(0.5 - 1 + LOG2)
    assert float(unbiased(p, q, q)) == pytest.approx(2 * (0.5 - 1 + LOG2))


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


def test_only_the_unbiased_one_has_the_gradient_of_the_divergence_off_policy() -> None:
    """Expectation over a sampler of the estimate's gradient with respect to logits, against that of KL(p || q)."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
    ref = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    sampler = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)

    def exact(x):
        p = x.log_softmax(-1)
        return (p.exp() * (p - ref)).sum()

    def estimated(x, estimator, cap=20.0):
        penalty = reference_penalty(x.log_softmax(-1), ref, sampler.log(), estimator, cap)
        return (sampler * penalty).sum()

    right = finite_difference(exact, logits)
    torch.testing.assert_close(gradient(lambda x: estimated(x, "unbiased"), logits), right, atol=1e-8, rtol=0)
    on_policy = logits.softmax(-1)
    made = gradient(
        lambda x: (on_policy * reference_penalty(x.log_softmax(-1), ref, on_policy.log(), "k2")).sum(), logits
    )
    torch.testing.assert_close(made, right, atol=1e-8, rtol=0)
    of_k1 = gradient(
        lambda x: (on_policy * reference_penalty(x.log_softmax(-1), ref, on_policy.log(), "k1")).sum(), logits
    )
    assert of_k1.abs().max() < 1e-12
    assert (gradient(lambda x: estimated(x, "k3"), logits) - right).abs().max() > 1e-2


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased"])
def test_reference_penalty_gradient_equals_finite_differences(estimator) -> None:
    """Below the cap."""
    generator = torch.Generator().manual_seed(0)
    p, q, sampler = (torch.randn(8, dtype=torch.float64, generator=generator) for _ in range(3))

    def total(x):
        return reference_penalty(x, q, sampler, estimator, 10.0).sum()

    torch.testing.assert_close(gradient(total, p), finite_difference(total, p), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased"])
def test_reference_penalty_has_no_gradient_beyond_the_cap(estimator) -> None:
    """Reference e^4 times likelier than the policy, cap 3."""
    at, ref = torch.tensor([-5.0, -1.0]), torch.tensor([-1.0, -1.5])
    made = gradient(lambda x: reference_penalty(x, ref, at, estimator, 3.0).sum(), at)
    assert made[0] == 0
    assert made[1] != 0
    value = float(reference_penalty(at, ref, at, estimator, 3.0)[0])
    expected = {"k1": -3.0, "k2": 4.5, "k3": math.exp(3) - 4, "unbiased": math.exp(3) - 4}
    assert value == pytest.approx(expected[estimator], rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased"])
def test_reference_penalty_does_not_see_masked_tokens(estimator) -> None:
    """NaN everywhere at the masked place, 0 out."""
    nan = float("nan")
    at, other = torch.tensor([-1.0, nan], requires_grad=True), torch.tensor([-1.5, nan])
    penalty = reference_penalty(at, other, other, estimator, 3.0, torch.tensor([True, False]))
    penalty.sum().backward()
    assert penalty[1] == 0
    assert at.grad[1] == 0
    assert torch.isfinite(at.grad).all()


def test_reference_penalty_refuses_an_unknown_estimator() -> None:
    """The choices are named."""
    with pytest.raises(ValueError, match="estimator must be k1, k2, k3 or unbiased, got 'k4'"):
        reference_penalty(P, Q, P, "k4")
