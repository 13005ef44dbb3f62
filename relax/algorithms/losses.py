"""What a policy loss is given and what it gives, and which there are. The formulas are one file each.

A loss is per token; `relax.algorithms.reduction` says how tokens add up to one number.

Shapes: N tokens (the completion tokens of whole rows, row after row).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from relax.algorithms.cispo import cispo
from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.gspo import gspo
from relax.algorithms.inputs import LossInputs, PolicyLoss
from relax.algorithms.ppo_clip import ppo_clip
from relax.algorithms.reinforce import reinforce
from relax.algorithms.sapo import sapo
from relax.algorithms.surrogate import surrogate

PolicyLossFunction = Callable[[LossInputs, AlgorithmConfig], PolicyLoss]

BY_NAME: Mapping[str, PolicyLossFunction] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "surrogate": surrogate,
    "reinforce": reinforce,
}
