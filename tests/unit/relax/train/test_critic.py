"""The value head: what it starts at, what it learns, what reaches the trunk, and that it goes on exactly."""

from __future__ import annotations

import pytest
import torch

from relax.algorithms.sections import CriticConfig
from relax.errors import TrainingError
from relax.train.critic import Critic

HIDDEN = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
RETURNS = HIDDEN @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 0.3


def learn(critic: Critic, num_steps: int) -> None:
    """Take gradient steps on the squared distance from `RETURNS`."""
    for _ in range(num_steps):
        (critic.values(HIDDEN) - RETURNS).square().mean().backward()
        critic.update(1.0, skip=False)


def test_critic_starts_at_zero_and_learns_a_linear_value() -> None:
    """The weights are those that made the returns."""
    critic = Critic(4, CriticConfig(lr=0.1))
    assert critic.values(HIDDEN).abs().max() == 0
    learn(critic, 400)
    torch.testing.assert_close(critic.values(HIDDEN), RETURNS, atol=1e-2, rtol=0)


@pytest.mark.parametrize("reaches", [True, False])
def test_value_loss_reaches_the_trunk_when_told(reaches) -> None:
    """The head has its gradient in both cases."""
    critic = Critic(4, CriticConfig(trunk_gradient=reaches, lr=0.1))
    learn(critic, 1)
    hidden = HIDDEN.clone().requires_grad_()
    (critic.values(hidden) - RETURNS).square().mean().backward()
    assert (hidden.grad is not None) == reaches
    assert critic.head.weight.grad.abs().max() > 0


def test_skipped_update_forgets_the_gradient_and_changes_nothing() -> None:
    """Nor does one that is not finite."""
    critic = Critic(4, CriticConfig())
    (critic.values(HIDDEN) - RETURNS).square().mean().backward()
    metrics = critic.update(0.5, skip=True)
    assert metrics["critic_lr"] == 0.005
    assert metrics["critic_grad_norm"] > 0
    (critic.values(HIDDEN) * float("inf")).sum().backward()
    critic.update(1.0, skip=False)
    assert critic.values(HIDDEN).abs().max() == 0
    assert critic.head.weight.grad is None


def test_critic_goes_on_exactly_from_its_tensors() -> None:
    """Moments and step count included; also before the first step."""
    straight, first = Critic(4, CriticConfig()), Critic(4, CriticConfig())
    learn(straight, 5)
    learn(first, 3)
    second = Critic(4, CriticConfig())
    second.load(first.tensors())
    learn(second, 2)
    assert torch.equal(second.values(HIDDEN), straight.values(HIDDEN))
    second.load(Critic(4, CriticConfig()).tensors())
    learn(second, 5)
    assert torch.equal(second.values(HIDDEN), straight.values(HIDDEN))


def test_critic_refuses_the_tensors_of_another_head() -> None:
    """Both shapes are said."""
    with pytest.raises(TrainingError) as caught:
        Critic(4, CriticConfig()).load(Critic(3, CriticConfig()).tensors())
    assert str(caught.value) == (
        "critic: the checkpoint must hold a head of {'head.weight': (1, 4), 'head.bias': (1,)}, "
        "got {'head.weight': (1, 3), 'head.bias': (1,)}"
    )
