"""The trainer's configuration and learning-rate schedule."""

from __future__ import annotations

import subprocess
import sys

import pytest

from relax.errors import ConfigError
from relax.train.config import TrainerConfig, lr_multiplier


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "actor.lr: must be above 0, got 0.0"),
        ({"lr": float("nan")}, "actor.lr: must be above 0, got nan"),
        ({"lr_decay": "step"}, "actor.lr_decay: must be one of constant, linear, cosine, got 'step'"),
        (
            {"lr_decay": "linear"},
            "actor.decay_steps: must be at least 1 with lr_decay linear, got None",
        ),
        ({"max_grad_norm": 0.0}, "actor.max_grad_norm: must be above 0, or absent for no clipping, got 0.0"),
        ({"beta2": 1.0}, "actor.beta2: must be at least 0 and below 1, got 1.0"),
    ],
)
def test_trainer_config_refuses_what_cannot_be(settings, message) -> None:
    """The key, the rule and the value are said."""
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(**settings)
    assert str(caught.value) == message


def test_lr_multiplier_warms_up_and_decays() -> None:
    """Linear growth, then the decay's shape, then its end."""
    constant = TrainerConfig(warmup_steps=4)
    assert [lr_multiplier(constant, step) for step in (1, 2, 4, 100)] == [0.25, 0.5, 1.0, 1.0]
    linear = TrainerConfig(warmup_steps=2, lr_decay="linear", decay_steps=12, min_lr_ratio=0.2)
    assert [lr_multiplier(linear, step) for step in (2, 7, 12, 50)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    cosine = TrainerConfig(warmup_steps=0, lr_decay="cosine", decay_steps=10, min_lr_ratio=0.0)
    assert [lr_multiplier(cosine, step) for step in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    late = TrainerConfig(warmup_steps=0, lr_decay="linear", decay_from=0.5, decay_steps=10, min_lr_ratio=0.0)
    assert [lr_multiplier(late, step) for step in (5, 6, 10)] == pytest.approx([1.0, 0.8, 0.0])
    short = TrainerConfig(warmup_steps=5, lr_decay="linear", decay_steps=3)
    assert lr_multiplier(short, 5) == 1.0


def test_configs_import_no_torch() -> None:
    """The configuration of a run loads in programs that never train."""
    code = "import sys, relax.train.config, relax.algorithms.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
