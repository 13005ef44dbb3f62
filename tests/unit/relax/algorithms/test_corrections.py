"""Corrections against hand-computed numbers."""

from __future__ import annotations

import torch

from relax.algorithms.corrections import truncated_importance_weight


def test_truncated_importance_weight_cuts_only_above() -> None:
    """Small ratios stay small."""
    weight = truncated_importance_weight(torch.tensor([0.01, 1.0, 2.5]), 2.0)
    torch.testing.assert_close(weight, torch.tensor([0.01, 1.0, 2.0]))
