"""One rank's place in the trainer's world, and the few collectives that the trainer's own code uses.

Host data (bytes, CPU tensors) goes by gloo, device tensors by NCCL where there is a device. With one process every
function here returns at once.

Shapes: any tensor unless said.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from relax.train.layout import LayoutConfig, Place
from relax.train.mcore_compat import parallel_state


@dataclass(frozen=True, kw_only=True)
class World:
    """Where this process stands, and its groups."""

    rank: int
    layout: LayoutConfig
    place: Place
    device: torch.device
    stage_group: Any
    """Ranks of one stage that train the same rows: tensor and context parallel neighbours."""
    stage_ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.layout.num_procs

    @property
    def is_first_stage(self) -> bool:
        return self.place.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.place.pp_rank == self.layout.pp - 1

    @property
    def leads_stage(self) -> bool:
        """Whether this rank fetches what the ranks of its stage group share."""
        return self.place.tp_rank == 0 and self.place.cp_rank == 0

    @property
    def speaks_for_rows(self) -> bool:
        """Whether this rank's record of its rows is the one that counts: the last stage, once."""
        return self.is_last_stage and self.leads_stage

    @property
    def tp_group(self) -> Any:
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def cp_group(self) -> Any:
        return parallel_state.get_context_parallel_group()

    @property
    def pp_group(self) -> Any:
        return parallel_state.get_pipeline_model_parallel_group()

    @property
    def data_group(self) -> Any:
        """Ranks that hold the same part of the parameters but for experts."""
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    @property
    def expert_data_group(self) -> Any:
        """Ranks that hold the same experts."""
        return parallel_state.get_expert_data_parallel_group()

    def neighbour(self, step: int) -> int:
        """Return the rank of the same place `step` stages on."""
        return self.rank + step * self.layout.stage_size

    def sum(self, values: Tensor) -> Tensor:
        """Add a tensor up over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def of_all_rows(self, values: Tensor) -> Tensor:
        """Return what the ranks recorded of all rows, each of its own and zero elsewhere. All ranks must call it."""
        if self.size == 1:
            return values
        held = values if self.speaks_for_rows else torch.zeros_like(values)
        return self.sum(held.to(self.device, copy=True)).to(values.device)

    def of_all_stages(self, values: Tensor) -> Tensor:
        """Return each stage's tensor under this place, [stages, ...]; all must be of one shape."""
        if self.layout.pp == 1:
            return values[None]
        held = values.to(self.device)
        parts = [torch.empty_like(held) for _ in range(self.layout.pp)]
        dist.all_gather(parts, held, group=self.pp_group)
        return torch.stack(parts).to(values.device)

    def largest(self, value: int) -> int:
        """Return the largest of all ranks' numbers."""
        if self.size == 1:
            return value
        held = torch.tensor([value], device=self.device)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return int(held)

    def tell(self, value: Any = None) -> Any:
        """Return rank 0's JSON value on all ranks."""
        if self.size == 1:
            return value
        data = json.dumps(value).encode() if self.rank == 0 else None
        return json.loads(self.broadcast(data))

    def collect(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, in their order, on each of them."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]))
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        padded[: len(data)] = data
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded)
        told = zip(parts, lengths, strict=True)
        return [json.loads(part[: int(length)].numpy().tobytes()) for part, length in told]

    def broadcast(self, data: bytes | None, *, stage: bool = False) -> bytes:
        """Return the bytes of rank 0 on all ranks; with `stage`, those of the leader of each stage group."""
        ranks = self.stage_ranks if stage else tuple(range(self.size))
        if len(ranks) == 1:
            if data is None:
                raise ValueError("World.broadcast: the source must have data, got none")
            return data
        group = self.stage_group if stage else None
        length = torch.tensor([0 if data is None else len(data)])
        dist.broadcast(length, ranks[0], group=group)
        if self.rank == ranks[0]:
            held = torch.frombuffer(bytearray(data or b""), dtype=torch.uint8)
        else:
            held = torch.empty(int(length), dtype=torch.uint8)
        if len(held):
            dist.broadcast(held, ranks[0], group=group)
        return held.numpy().tobytes()

    def wait_for_all(self) -> None:
        """Block until every rank has come here."""
        self.sum(torch.zeros(1, device=self.device))


class GatherRows(torch.autograd.Function):
    """Join the rows of all ranks of a group, in rank order; backward keeps the own rows' gradient.

    Right where all ranks compute the same from the joined rows: the gradient of a row is whole on each of them.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Sequence[int], group: Any) -> Tensor:
        """Rows [n_r, ...] of this rank to [sum of n, ...]."""
        rank = dist.get_rank(group)
        ctx.start, ctx.count = sum(counts[:rank]), counts[rank]
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the own rows."""
        return gradients[0][ctx.start : ctx.start + ctx.count], None, None


class SumOverRanks(torch.autograd.Function):
    """Add a tensor up over the ranks of a group; backward keeps the gradient.

    Right where all ranks compute the same from the sum: the gradient of a summand is whole on each of them.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        """Return the sum, of the shape of one summand."""
        summed = values.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the sum's gradient."""
        return gradients[0], None


class GatherTokens(torch.autograd.Function):
    """Join the tokens of all ranks of a group along the first dimension; backward adds up all ranks' gradients.

    Right for keys and values, of which each rank uses all with its own queries.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, group: Any) -> Tensor:
        """Tokens [t, ...] of this rank to [ranks * t, ...]."""
        ctx.group, ctx.count = group, len(tokens)
        parts = [torch.empty_like(tokens) for _ in range(group.size())]
        dist.all_gather(parts, tokens.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the own tokens' gradient, summed over the ranks."""
        whole = gradients[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)
        start = dist.get_rank(ctx.group) * ctx.count
        return whole[start : start + ctx.count], None
