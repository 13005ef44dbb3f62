"""Made-up tokens of a few rows, and gradients by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from relax.algorithms.inputs import LossInputs

ROWS = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3, 3])
"""Rows of three, two, one and four tokens."""


def log(*ratios: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the log-probability differences that give these ratios."""
    return torch.tensor([math.log(ratio) for ratio in ratios], dtype=dtype)


def inputs_of(ratios: Tensor, advantages: list[float], rows: list[int] | None = None) -> LossInputs:
    """Return the inputs of tokens whose log-ratios are given; the proximal logprobs are -1."""
    rows_N = torch.tensor(rows or [0] * len(advantages))
    return LossInputs.of(
        ratios - 1.0, torch.full_like(ratios, -1.0), torch.tensor(advantages, dtype=ratios.dtype), rows_N
    )


def random_tokens(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return float64 logprobs, proximal logprobs and advantages for `ROWS`; no value is at an edge of a clip."""
    generator = torch.Generator().manual_seed(seed)
    shape = {"generator": generator, "dtype": torch.float64}
    proximal = -torch.rand(len(ROWS), **shape) - 1.0
    logprobs = proximal + 0.6 * torch.randn(len(ROWS), **shape)
    return logprobs, proximal, torch.randn(len(ROWS), **shape)


def finite_difference(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> Tensor:
    """Return the gradient of a number by central differences."""
    gradient = torch.zeros_like(at)
    for place in range(len(at)):
        shift = torch.zeros_like(at)
        shift[place] = step
        gradient[place] = (function(at + shift) - function(at - shift)) / (2 * step)
    return gradient


def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Return the gradient of a number as torch computes it."""
    leaf = at.detach().clone().requires_grad_()
    function(leaf).backward()
    return leaf.grad
