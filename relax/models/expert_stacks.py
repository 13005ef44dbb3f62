"""Checkpoints that keep all experts of a layer in one tensor, and the tensor of each expert's matrices.

    ...experts.gate_up_proj   [E, H, 2 I]  or as transformers saves it [E, 2 I, H]
    ...experts.down_proj      [E, I, H]    or                          [E, H, I]
    ...experts.N.gate_proj.weight, .up_proj.weight [I, H], .down_proj.weight [H, I]

Where both readings of a shape are possible the second is taken, as transformers does. Views, no copies, until a stack
is made anew.

Shapes: E experts, H hidden size, I width of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_MATRIX = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class ExpertStacks:
    """Takes the stacks of one checkpoint apart and puts them together again.

    Args:
        shapes: Of the checkpoint's tensors, by name; those that are no stacks are passed over.
        hidden_size: H.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], hidden_size: int) -> None:
        self._is_turned: dict[str, bool] = {}
        """Of each stack, whether its matrices are [in, out]."""
        for name, shape in shapes.items():
            found = _STACK.fullmatch(name)
            if found is not None:
                self._is_turned[name] = shape[2 if found[2] == GATE_UP else 1] != hidden_size

    def __bool__(self) -> bool:
        return bool(self._is_turned)

    def turned(self, name: str, stack: Tensor) -> Tensor:
        """Return a stack of [out, in] matrices as the checkpoint has it, or the other way round; a view."""
        return stack.transpose(1, 2) if self._is_turned.get(name) else stack

    def split(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors with each stack replaced by the matrices of its experts."""
        named: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if name not in self._is_turned:
                named[name] = tensor
                continue
            stem, kind = name.rsplit(".", 1)
            for expert, matrix in enumerate(self.turned(name, tensor)):
                named |= _matrices(f"{stem}.{expert}", kind, matrix)
        return named

    def join(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors with the matrices of experts put together to the checkpoint's stacks."""
        named, parts = {}, dict[str, dict[str, dict[int, Tensor]]]()
        for name, tensor in tensors.items():
            found = _MATRIX.fullmatch(name)
            if found is None or f"{found[1]}.{DOWN}" not in self._is_turned:
                named[name] = tensor
            else:
                parts.setdefault(found[1], {}).setdefault(found[3], {})[int(found[2])] = tensor
        for stem, kinds in parts.items():
            order = range(len(kinds["down"]))
            both = torch.stack([torch.cat((kinds["gate"][at], kinds["up"][at])) for at in order])
            down = torch.stack([kinds["down"][at] for at in order])
            for kind, stack in ((GATE_UP, both), (DOWN, down)):
                named[f"{stem}.{kind}"] = self.turned(f"{stem}.{kind}", stack)
        return named


def split_stack(name: str, stack: Tensor) -> dict[str, Tensor]:
    """Return the matrices of a module's stack, [out, in], by the names that a checkpoint without stacks has."""
    stem, kind = name.rsplit(".", 1)
    named: dict[str, Tensor] = {}
    for expert, matrix in enumerate(stack):
        named |= _matrices(f"{stem}.{expert}", kind, matrix)
    return named


def is_stack(name: str) -> bool:
    """Whether a name is that of a stack."""
    return _STACK.fullmatch(name) is not None


def _matrices(stem: str, kind: str, matrix: Tensor) -> dict[str, Tensor]:
    if kind == DOWN:
        return {f"{stem}.down_proj.weight": matrix}
    gate, up = matrix.chunk(2)
    return {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
