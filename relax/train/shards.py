"""Which part of each Megatron parameter a rank holds, and whole tensors from the parts.

A parameter is known by its global name: the layer and the expert counted over all ranks. Tensor parallelism cuts
matrices, never experts; pipeline parallelism deals out layers, expert parallelism experts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from relax.train.ranks import World

_CUTS = (
    (r"embedding\.word_embeddings\.weight|output_layer\.weight", 0, 1),
    (r"decoder\.layers\.\d+\.self_attention\.linear_qkv\.(weight|bias)", 0, 1),
    (r"decoder\.layers\.\d+\.self_attention\.linear_proj\.weight", 1, 1),
    (r"decoder\.layers\.\d+\.mlp\.linear_fc1\.weight", 0, 2),
    (r"decoder\.layers\.\d+\.mlp\.linear_fc2\.weight", 1, 1),
)


@dataclass(frozen=True)
class Cut:
    """How tensor parallel ranks share one parameter.

    dim: the dimension that is cut; None: every rank has the whole.
    blocks: stacked matrices that are cut each for itself (gate above up).
    """

    dim: int | None
    blocks: int = 1

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Return one rank's part of a whole tensor; a view where nothing is cut."""
        if self.dim is None or size == 1:
            return whole
        blocks = whole.chunk(self.blocks, self.dim)
        return torch.cat([block.chunk(size, self.dim)[rank] for block in blocks], self.dim)

    def whole(self, parts: list[Tensor]) -> Tensor:
        """Return the whole tensor of all ranks' parts."""
        if self.dim is None or len(parts) == 1:
            return parts[0]
        blocks = zip(*(part.chunk(self.blocks, self.dim) for part in parts), strict=True)
        return torch.cat([torch.cat(block, self.dim) for block in blocks], self.dim)

    def whole_shape(self, part: torch.Size, size: int) -> list[int]:
        """Return the shape of the whole tensor, given that of a part."""
        return [length * size if dim == self.dim else length for dim, length in enumerate(part)]


def cut_of(name: str) -> Cut:
    """Return how a parameter of the language model is cut."""
    for pattern, dim, blocks in _CUTS:
        if re.fullmatch(pattern, name):
            return Cut(dim, blocks)
    return Cut(None)


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to an expert."""
    return ".mlp.experts." in name


def global_name(name: str, first_layer: int, first_expert: int) -> str:
    """Return a parameter's name over all ranks, given what comes first on this one."""
    name = re.sub(r"(decoder\.layers\.)(\d+)", lambda m: f"{m[1]}{int(m[2]) + first_layer}", name)
    return re.sub(r"(local_experts\.)(\d+)", lambda m: f"{m[1]}{int(m[2]) + first_expert}", name)


def num_holders(name: str, world: World, *, in_language_model: bool) -> int:
    """Return how many ranks hold the same part of a parameter of this rank's stage."""
    layout = world.layout
    if in_language_model and is_expert(name):
        return layout.stage_size // layout.ep
    if in_language_model and cut_of(name).dim is not None:
        return layout.stage_size // layout.tp
    return layout.stage_size


def gather_whole(world: World, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole tensors by global name on rank 0, and nothing on the others. All ranks must call it.

    Args:
        world: This rank's place.
        parts: Of the language model, by global name; the same kinds on all ranks of a stage.
    """
    if world.size == 1:
        return dict(parts)
    place, shared = world.place, {}
    if place.cp_rank == 0 and place.dp_rank == 0:
        shared = {name: _join_cut(world, name, part) for name, part in parts.items() if not is_expert(name)}
    sent: dict[str, Tensor] = shared if place.tp_rank == 0 else {}
    if world.rank % world.layout.stage_size < world.layout.ep:
        sent |= {name: part for name, part in parts.items() if is_expert(name)}
    sent = {name: tensor.detach() for name, tensor in sent.items()}
    if world.rank:
        if _sends(world, world.rank):
            _send(sent)
        return {}
    for rank in range(1, world.size):
        if _sends(world, rank):
            sent |= _receive(rank)
    return sent


def _join_cut(world: World, name: str, part: Tensor) -> Tensor:
    cut = cut_of(name)
    if cut.dim is None or world.layout.tp == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(world.layout.tp)]
    dist.all_gather(parts, part.detach().contiguous(), group=world.tp_group)
    return cut.whole(parts)


def _sends(world: World, rank: int) -> bool:
    place = world.layout.place(rank)
    leads = place.tp_rank == place.cp_rank == place.dp_rank == 0
    return leads or rank % world.layout.stage_size < world.layout.ep


def _send(tensors: Mapping[str, Tensor]) -> None:
    header = json.dumps([[n, list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in tensors.items()])
    held = torch.frombuffer(bytearray(header.encode()), dtype=torch.uint8)
    dist.send(torch.tensor([len(held)]), 0)
    dist.send(held, 0)
    for tensor in tensors.values():
        dist.send(tensor.cpu().contiguous(), 0)


def _receive(rank: int) -> dict[str, Tensor]:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, rank)
    held = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(held, rank)
    tensors = {}
    for name, shape, dtype in json.loads(held.numpy().tobytes()):
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        dist.recv(tensors[name], rank)
    return tensors
