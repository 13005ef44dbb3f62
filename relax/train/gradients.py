"""Gradients over the ranks: each parameter's parts added up, and the norm of all of them.

The loss of a step is a sum over the tokens of the whole batch, so gradients are sums too; nothing is divided here.

    every rank has a part of the tokens    data and context parallel: all parameters; experts over the ranks that hold
                                           the same ones, tensor parallel neighbours among them
    or a part of the heads                 tensor parallel: norms of queries and keys
    or a part of the sequence              sequence parallel: all that tensor parallelism does not cut
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from relax.train.ranks import World
from relax.train.shards import cut_of, is_expert, num_holders

BUCKET_BYTES = 64 << 20
"""Gradients that travel in one message."""


class GradientSum:
    """Sums and measures the gradients of one rank's parameters.

    Args:
        world: This rank's place.
        language_model: The decoder's trained parameters, by global name.
        others: Those of the towers.
    """

    def __init__(
        self, world: World, language_model: Mapping[str, Tensor], others: Mapping[str, Tensor]
    ) -> None:
        self._world = world
        self._of_holders: dict[int, list[Tensor]] = defaultdict(list)
        for name, parameter in language_model.items():
            self._of_holders[num_holders(name, world, in_language_model=True)].append(parameter)
        for name, parameter in others.items():
            self._of_holders[num_holders(name, world, in_language_model=False)].append(parameter)
        experts = [parameter for name, parameter in language_model.items() if is_expert(name)]
        shared = [parameter for name, parameter in language_model.items() if not is_expert(name)]
        partial = [parameter for name, parameter in language_model.items() if self._is_partial(name)]
        layout = world.layout
        self._sums: list[tuple[list[Tensor], Any]] = []
        if layout.tp > 1:
            self._sums.append((partial, world.tp_group))
        if layout.data_parallel * layout.cp > 1:
            self._sums.append(([*shared, *others.values()], world.data_group))
        if layout.stage_size > layout.ep:
            self._sums.append((experts, world.expert_data_group))

    def add_up(self) -> None:
        """Replace every gradient by its sum over the ranks. All ranks must call it."""
        for parameters, group in self._sums:
            for bucket in _buckets(
                [parameter.grad for parameter in parameters if parameter.grad is not None]
            ):
                flat = torch.cat([gradient.flatten() for gradient in bucket])
                dist.all_reduce(flat, group=group)
                for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    gradient.copy_(summed.view_as(gradient))

    def norm(self) -> Tensor:
        """Return the norm of all parameters' gradients, each counted once, the same on all ranks."""
        if self._world.size == 1:
            return torch.nn.utils.get_total_norm(_gradients(chain.from_iterable(self._of_holders.values())))
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for holders, parameters in self._of_holders.items():
            total += torch.nn.utils.get_total_norm(_gradients(parameters)).double().square() / holders
        return self._world.sum(total).sqrt().float()

    def _is_partial(self, name: str) -> bool:
        """Whether tensor parallel ranks have each a part of the gradient of a parameter that they hold whole."""
        if is_expert(name) or cut_of(name).dim is not None:
            return False
        return self._world.layout.splits_norms or name.endswith(("q_layernorm.weight", "k_layernorm.weight"))


def is_finite(loss: float, norm: Tensor) -> bool:
    """Whether a step may change the weights."""
    return math.isfinite(loss) and bool(torch.isfinite(norm))


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    room = 0
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        if not buckets or size > room:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(gradient)
        room -= size
    return buckets
