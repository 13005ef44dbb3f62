"""Micro-batches through the stages of a pipeline: one forward, one backward (1F1B), and forward alone.

    stage 0   f0 f1 .. .. b0 f2 b1 f3 b2 .. b3
    stage 1      f0 b0 f1 b1 f2 b2 f3 b3

A stage keeps at most as many micro-batches in memory as there are stages after it, and one. With one stage it is a
plain loop. All ranks of a stage run the same micro-batches in the same order.

Source: PipeDream-2BW and Megatron-LM (arXiv:2104.04473), section 2.2, the schedule without interleaving.

Shapes: R tokens of a sequence on this rank, B sequences, H hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from relax.train.ranks import World


class ForwardTask(Protocol):
    """One micro-batch on this stage."""

    shape: tuple[int, int, int]
    """Of the hidden states between the stages, [R, B, H]."""

    def forward(self, received_RBH: Tensor | None) -> Tensor:
        """Return what goes to the next stage, or on the last one the loss; nothing is received on the first."""


class StageTask(ForwardTask, Protocol):
    """A micro-batch that also runs backward; it takes memory from the one to the other."""

    def backward(self) -> AbstractContextManager[None]:
        """Return the block in which the backward pass runs."""


class Pipeline:
    """The neighbours of a stage, and the order in which it does its tasks."""

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self._world = world
        self._dtype = dtype

    def train(self, tasks: Sequence[StageTask]) -> None:
        """Run every task forward and backward; gradients add up in the parameters."""
        num_ahead = min(self._world.layout.pp - 1 - self._world.place.pp_rank, len(tasks))
        in_flight: deque[_InFlight] = deque()
        for task in tasks[:num_ahead]:
            in_flight.append(_start(task, self._exchange(from_previous=task)[0]))
            self._exchange(to_next=in_flight[-1].output)
        alternating = tasks[num_ahead:]
        received = self._exchange(from_previous=alternating[0])[0] if alternating else None
        for task, following in zip(alternating, [*alternating[1:], None], strict=False):
            in_flight.append(_start(task, received))
            output, oldest = in_flight[-1].output, in_flight.popleft()
            gradient = self._exchange(to_next=output, from_next=oldest.task)[1]
            received = self._exchange(to_previous=_finish(oldest, gradient), from_previous=following)[0]
        while in_flight:
            oldest = in_flight.popleft()
            gradient = self._exchange(from_next=oldest.task)[1]
            self._exchange(to_previous=_finish(oldest, gradient))

    @torch.no_grad()
    def score(self, tasks: Sequence[ForwardTask]) -> None:
        """Run every task forward alone."""
        for task in tasks:
            self._exchange(to_next=task.forward(self._exchange(from_previous=task)[0]))

    def _exchange(
        self,
        *,
        to_next: Tensor | None = None,
        from_next: ForwardTask | None = None,
        to_previous: Tensor | None = None,
        from_previous: ForwardTask | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send and receive at once, so that no two stages wait for each other; return (from previous, from next)."""
        world, moves = self._world, []
        activation, gradient = None, None
        if not world.is_last_stage:
            if to_next is not None:
                moves.append(dist.P2POp(dist.isend, to_next.detach().contiguous(), world.neighbour(1)))
            if from_next is not None:
                gradient = torch.empty(from_next.shape, dtype=self._dtype, device=world.device)
                moves.append(dist.P2POp(dist.irecv, gradient, world.neighbour(1)))
        if not world.is_first_stage:
            if to_previous is not None:
                moves.append(dist.P2POp(dist.isend, to_previous.contiguous(), world.neighbour(-1)))
            if from_previous is not None:
                activation = torch.empty(from_previous.shape, dtype=self._dtype, device=world.device)
                moves.append(dist.P2POp(dist.irecv, activation, world.neighbour(-1)))
        for work in dist.batch_isend_irecv(moves) if moves else ():
            work.wait()
        return activation, gradient


@dataclass(frozen=True)
class _InFlight:
    task: StageTask
    received: Tensor | None
    output: Tensor


def _start(task: StageTask, received: Tensor | None) -> _InFlight:
    if received is not None:
        received.requires_grad_()
    return _InFlight(task, received, task.forward(received))


def _finish(flight: _InFlight, gradient: Tensor | None) -> Tensor | None:
    """Run a task backward and return the gradient of what it had received."""
    with flight.task.backward():
        torch.autograd.backward(flight.output, gradient)
    return None if flight.received is None else flight.received.grad
