"""Names and layouts of tensors: Hugging Face checkpoint <-> Megatron-core model, both ways, nothing left over.

A rule says which checkpoint tensors make one Megatron parameter, how they are merged and how they are split again:

    qkv            per key/value group: its queries, its key, its value
    vocabulary     rows of zeros below, where tensor parallel ranks could not have equal parts
    linear_fc1     gate above up
    the rest       one to one

Names count layers and experts over all ranks, and rules are about whole tensors; `relax.train.shards` cuts them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from relax.errors import TrainingError
from relax.train.shards import cut_of


@dataclass(frozen=True)
class Rule:
    """How one Megatron parameter is stored in a checkpoint."""

    names: tuple[str, ...]
    merge: Callable[[list[Tensor]], Tensor]
    split: Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class NameMap:
    """Translates one model's names.

    `text` is what the checkpoint puts before `layers.` and `embed_tokens.`, `head` its name of the output matrix.
    Matrices of the vocabulary may have rows here that the checkpoint does not have: `padding`, of zeros.
    """

    text: str
    head: str
    num_heads: int
    num_groups: int
    head_size: int
    padding: int = 0

    def rule(self, name: str) -> Rule:
        """Return the rule of a Megatron parameter.

        Raises:
            TrainingError: the name is not one that the language model here has.
        """
        if name in VOCABULARY:
            return Rule((self.head if name == _OUTPUT else self.text + _EMBEDDING,), self._pad, self._unpad)
        if name == "decoder.final_layernorm.weight":
            return _one_to_one(f"{self.text}norm.weight")
        found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if found is None:
            raise TrainingError(f"names: {name!r} must be a parameter of the decoder; add a rule for it")
        layer, part = f"{self.text}layers.{found[1]}.", found[2]
        if part in _PER_LAYER:
            return _one_to_one(layer + _PER_LAYER[part])
        if part in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            kind = part.rsplit(".", 1)[1]
            names = tuple(f"{layer}self_attn.{which}_proj.{kind}" for which in "qkv")
            return Rule(names, self._merge_qkv, self._split_qkv)
        found = re.fullmatch(r"mlp\.(?:experts\.local_experts\.(\d+)\.)?linear_fc([12])\.weight", part)
        if found is None:
            raise TrainingError(f"names: {name!r} must be a known part of a layer; add a rule for it")
        mlp = f"{layer}mlp." if found[1] is None else f"{layer}mlp.experts.{found[1]}."
        if found[2] == "2":
            return _one_to_one(f"{mlp}down_proj.weight")
        return Rule(
            (f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"), torch.cat, lambda both: list(both.chunk(2))
        )

    def to_checkpoint(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's names and tensors of Megatron parameters; views where the layout allows."""
        for name, parameter in parameters:
            rule = self.rule(name)
            yield from zip(rule.names, rule.split(parameter.detach()), strict=True)

    def from_checkpoint(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        tensors: Mapping[str, Tensor],
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> set[str]:
        """Copy checkpoint tensors into this rank's part of Megatron parameters and return the names that were used.

        Raises:
            TrainingError: a tensor is missing or has another shape; the message names it.
        """
        used: set[str] = set()
        for name, parameter in parameters:
            rule, cut = self.rule(name), cut_of(name)
            missing = [part for part in rule.names if part not in tensors]
            if missing:
                raise TrainingError(
                    f"names: checkpoint must hold {missing[0]!r} for {name!r}, got nothing there"
                )
            whole = torch.empty(cut.whole_shape(parameter.shape, tp_size), device="meta")
            for part, expected in zip(rule.names, rule.split(whole), strict=True):
                if tensors[part].shape != expected.shape:
                    raise TrainingError(
                        f"names: {part!r} must be {list(expected.shape)}, got {list(tensors[part].shape)}"
                    )
            merged = rule.merge([tensors[part].to(parameter.dtype) for part in rule.names])
            with torch.no_grad():
                parameter.copy_(cut.part(merged, tp_rank, tp_size))
            used.update(rule.names)
        return used

    def _pad(self, parts: list[Tensor]) -> Tensor:
        return functional.pad(parts[0], (0, 0, 0, self.padding)) if self.padding else parts[0]

    def _unpad(self, whole: Tensor) -> list[Tensor]:
        return [whole[: len(whole) - self.padding]]

    def _merge_qkv(self, parts: list[Tensor]) -> Tensor:
        grouped = [part.reshape(self.num_groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def _split_qkv(self, merged: Tensor) -> list[Tensor]:
        queries = self.num_heads // self.num_groups * self.head_size
        grouped = merged.reshape(self.num_groups, -1, *merged.shape[1:])
        return [
            part.flatten(0, 1) for part in grouped.split([queries, self.head_size, self.head_size], dim=1)
        ]


_OUTPUT = "output_layer.weight"
VOCABULARY = ("embedding.word_embeddings.weight", _OUTPUT)
"""Matrices with a row for each token."""
_EMBEDDING = "embed_tokens.weight"
_PER_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


def _one_to_one(name: str) -> Rule:
    return Rule((name,), lambda parts: parts[0], lambda tensor: [tensor])
