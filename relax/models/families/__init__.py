"""Which models there are: one short module for each family, and the one list of them. No torch, no transformers.

To add a family, write a module with a `Family` beside these and name it in `FAMILIES`; docs/models.md says what to
test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax.models.errors import CheckpointError
from relax.models.families import qwen2_5_omni, qwen2_5_vl, qwen3, qwen3_omni, qwen3_vl
from relax.models.families.base import CheckpointNames, Family

__all__ = ["FAMILIES", "CheckpointNames", "Family", "family_of", "family_of_type"]

FAMILIES: tuple[Family, ...] = (
    qwen3.DENSE,
    qwen3.MOE,
    qwen3_vl.DENSE,
    qwen3_vl.MOE,
    qwen3_omni.THINKER,
    qwen2_5_vl.DENSE,
    qwen2_5_omni.THINKER,
)


def family_of(config: Mapping[str, Any], where: object = "config.json") -> Family:
    """Return the family of a model's configuration, by its `model_type`.

    Raises:
        CheckpointError: No family has that type.
    """
    return family_of_type(str(config.get("model_type")), where)


def family_of_type(model_type: str, where: object = "config.json") -> Family:
    """Return the family with this `model_type`.

    Raises:
        CheckpointError: There is none.
    """
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(kind for family in FAMILIES for kind in family.model_types)
    raise CheckpointError(f"{where}: model_type must be one of {known}, got {model_type!r}")
