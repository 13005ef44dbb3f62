"""Parameters of a model and the memory that they need, computed from its config.json; no weights are read or made.

    python tools/model_memory.py DIRECTORY ...      of model directories (config.json is enough)
    python tools/model_memory.py                    the table of docs/models.md

Activations, caches and what a framework takes for itself are not counted. Figures are GB of 10^9 bytes, over all ranks
of one copy of the model; data parallel ranks have a copy each.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from relax.models.loading import model_skeleton
from tools.published_models import PUBLISHED

BYTES = {"serve": 2, "train_bf16": 2 + 4 + 4 + 8, "train_fp32": 4 + 4 + 8}
"""Of a parameter: bf16 weights; also its fp32 master, gradient and two moments; all in fp32 without a master."""
HEADER = (
    "| checkpoint | parameters | of them towers | used by a token | bf16 weights | training, bf16 | training, fp32 |\n"
    "|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters: all, those of the towers, and those of the language model that one token goes through."""

    total: int
    towers: int
    active: int

    def memory_gb(self, kind: str) -> float:
        """Return the memory of `serve`, `train_bf16` or `train_fp32`."""
        return self.total * BYTES[kind] / 1e9


def count_parameters(model_dir: Path) -> Counts:
    """Count the parameters of the model that a directory's config.json describes; a shared matrix counts once."""
    thinker = model_skeleton(model_dir)
    total = sum(parameter.numel() for parameter in thinker.hf.parameters())
    towers = sum(p.numel() for tower in thinker.towers.values() for p in tower.parameters())
    experts = sum(p.numel() for name, p in thinker.text.named_parameters() if ".experts." in name)
    idle = experts - experts * thinker.spec.top_k // thinker.spec.num_experts if experts else 0
    return Counts(total=total, towers=towers, active=total - towers - idle)


def published_counts(name: str) -> Counts:
    """Count the parameters of a published checkpoint."""
    model_type, config = PUBLISHED[name]
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        (where / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
        (where / "preprocessor_config.json").write_text(json.dumps({"patch_size": 16}))
        return count_parameters(where)


def table_row(name: str, counts: Counts) -> str:
    """Return one row of the table."""
    memory = " | ".join(f"{counts.memory_gb(kind):.1f} GB" for kind in BYTES)
    towers = f"{counts.towers / 1e9:.2f} B" if counts.towers else "none"
    return f"| {name} | {counts.total / 1e9:.2f} B | {towers} | {counts.active / 1e9:.2f} B | {memory} |"


def main(directories: list[str]) -> None:
    """Print the table of the given directories, or that of the published checkpoints."""
    torch.set_num_threads(1)
    print(HEADER)
    for directory in directories:
        print(table_row(directory, count_parameters(Path(directory))))
    for name in () if directories else PUBLISHED:
        print(table_row(name, published_counts(name)))


if __name__ == "__main__":
    main(sys.argv[1:])
