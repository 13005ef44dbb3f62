"""Places in layouts without processes: `world_at` returns a `World` that has no groups (a fake in that alone)."""

from __future__ import annotations

import torch

from relax.train.layout import LayoutConfig
from relax.train.ranks import World


def world_at(layout: LayoutConfig, rank: int) -> World:
    """Return where a rank would stand; nothing that talks to other ranks works."""
    return World(
        rank=rank,
        layout=layout,
        place=layout.place(rank),
        device=torch.device("cpu"),
        stage_group=None,
        stage_ranks=(rank,),
    )
