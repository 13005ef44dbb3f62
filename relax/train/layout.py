"""How a trainer is spread over processes: the configuration, its rules, and each rank's place. It imports no torch.

    rank = tp_rank + tp * (cp_rank + cp * (dp_rank + dp * pp_rank))

Tensor parallel neighbours are next to each other, pipeline stages are farthest apart. Expert parallelism takes no
processes of its own: the ranks of a stage, `tp * cp * dp` of them, are cut into runs of `ep` that share the experts.
Experts are never cut as tensors (expert tensor parallel size 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from relax.errors import ConfigError


@dataclass(kw_only=True)
class LayoutConfig:
    """Sizes of the trainer's process groups; their product but for `ep` is the number of processes."""

    tp: int = 1
    """Ranks that share each weight matrix of the language model (tensor parallel)."""
    pp: int = 1
    """Ranks that share the layers, stage after stage (pipeline parallel)."""
    dp: int | None = None
    """Ranks that share the rows of a training batch (data parallel); absent: as few as `ep` needs."""
    ep: int = 1
    """Ranks of a stage that share the experts; divides tp * cp * dp."""
    cp: int = 1
    """Ranks that share the tokens of each sequence (context parallel)."""
    sequence_parallel: bool = True
    """With `tp`, share the tokens between the weight matrices too; mixtures of experts need it."""

    def __post_init__(self) -> None:
        for key in ("tp", "pp", "ep", "cp"):
            if getattr(self, key) < 1:
                raise ConfigError(f"actor.layout.{key}: must be at least 1, got {getattr(self, key)}")
        if self.dp is not None and self.dp < 1:
            raise ConfigError(
                f"actor.layout.dp: must be at least 1, or absent for as few as ep needs, got {self.dp}"
            )
        if self.stage_size % self.ep:
            raise ConfigError(
                f"actor.layout.ep: must divide tp * cp * dp = {self.stage_size}, the ranks of a stage, got {self.ep}"
            )

    @property
    def data_parallel(self) -> int:
        """Ranks that share the rows."""
        if self.dp is not None:
            return self.dp
        return self.ep // math.gcd(self.ep, self.tp * self.cp)

    @property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tp * self.cp * self.data_parallel

    @property
    def num_procs(self) -> int:
        """Processes of the trainer."""
        return self.stage_size * self.pp

    @property
    def splits_norms(self) -> bool:
        """Whether tensor parallel ranks share the tokens between the weight matrices."""
        return self.sequence_parallel and self.tp > 1

    @property
    def length_multiple(self) -> int:
        """What the padded length of a sequence must be divisible by, so that every rank gets as many tokens."""
        return (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.splits_norms else 1)

    def place(self, rank: int) -> Place:
        """Return where a rank stands."""
        rest, tp_rank = divmod(rank, self.tp)
        rest, cp_rank = divmod(rest, self.cp)
        pp_rank, dp_rank = divmod(rest, self.data_parallel)
        in_stage = rank % self.stage_size
        return Place(
            tp_rank=tp_rank, cp_rank=cp_rank, dp_rank=dp_rank, pp_rank=pp_rank, ep_rank=in_stage % self.ep
        )

    def stage_layers(self, num_layers: int) -> list[int]:
        """Return the number of layers of each stage; what does not go round is the first stage's."""
        each = num_layers // self.pp
        return [num_layers - each * (self.pp - 1), *[each] * (self.pp - 1)]


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank's coordinates."""

    tp_rank: int
    cp_rank: int
    dp_rank: int
    pp_rank: int
    ep_rank: int


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The numbers of a language model that a layout has to divide."""

    num_layers: int
    num_heads: int
    num_groups: int
    """Key/value heads."""
    dense_width: int | None
    """Width of the feed-forward part of layers without experts; None when there is none."""
    num_experts: int | None
    """None for a model without experts."""
    num_deepstack: int = 0
    """First layers that add visual features of their own."""
    tied: bool = False
    """Whether token embedding and output share a matrix."""


def check_layout(layout: LayoutConfig, sizes: ModelSizes) -> None:
    """Refuse a layout that the model cannot be cut by.

    Raises:
        ConfigError: a size does not divide what it cuts.
        ConfigError: experts with tp but without sequence_parallel.
        ConfigError: a stage without layers, or a deepstack layer or tied embedding outside the first stage.
    """
    for what, value, key, parts in (
        ("attention heads", sizes.num_heads, "tp", layout.tp),
        ("key/value heads", sizes.num_groups, "tp", layout.tp),
        ("dense feed-forward width", sizes.dense_width or 0, "tp", layout.tp),
        ("experts", sizes.num_experts or 0, "ep", layout.ep),
    ):
        if value % parts:
            raise ConfigError(f"actor.layout.{key}: must divide the model's {what}, {value}, got {parts}")
    if layout.ep > 1 and sizes.num_experts is None:
        raise ConfigError(f"actor.layout.ep: must be 1 for a model without experts, got {layout.ep}")
    if sizes.num_experts is not None and layout.tp > 1 and not layout.sequence_parallel:
        raise ConfigError(
            f"actor.layout.sequence_parallel: must be true with tp={layout.tp} for a mixture of experts, got false; "
            "else every tensor parallel rank would send the same tokens to the experts"
        )
    if layout.pp > sizes.num_layers:
        raise ConfigError(
            f"actor.layout.pp: must be at most the model's {sizes.num_layers} layers, got {layout.pp}"
        )
    first = layout.stage_layers(sizes.num_layers)[0]
    if first < sizes.num_deepstack:
        raise ConfigError(
            f"actor.layout.pp: the first stage must have the {sizes.num_deepstack} layers that add visual features, "
            f"got {first} of {sizes.num_layers} layers with pp={layout.pp}; the towers are on the first stage"
        )
    if layout.pp > 1 and sizes.tied:
        raise ConfigError(
            f"actor.layout.pp: must be 1 for a model whose embedding is also its output matrix, got {layout.pp}"
        )
