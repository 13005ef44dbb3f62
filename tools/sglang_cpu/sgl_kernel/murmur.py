"""MurmurHash3 of (seed, position, column): the random numbers behind per-request seeds.

Formula: 32-bit MurmurHash3 (Austin Appleby, public domain) over four words: low and high half of the seed, position,
column; the length that is mixed in at the end is 16 bytes. SGLang's own operator is a Triton kernel.
"""

from __future__ import annotations

import torch

WORD = 0xFFFFFFFF
_libraries: list[torch.library.Library] = []


def register() -> None:
    """Define `torch.ops.sgl_kernel.murmur_hash32_cpu`."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    torch.library.register_fake("sgl_kernel::murmur_hash32_cpu", _shape_only, lib=library)
    _libraries.append(library)


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Return the hash of every (seed, position) row and column.

    Shapes: seed and positions [R] (64-bit seeds), col_indices [C]; result uint32 [R, C].
    """
    seeds = seed.view(torch.int64)
    words = (
        (seeds & WORD)[:, None],
        ((seeds >> 32) & WORD)[:, None],
        (positions.to(torch.int64) & WORD)[:, None],
        (col_indices.to(torch.int64) & WORD)[None, :],
    )
    value = torch.zeros_like(words[0])
    for word in words:
        value = _mix(value, word)
    value = value ^ 16
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & WORD
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & WORD
    return (value ^ (value >> 16)).to(torch.uint32)


def _mix(value: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = (_rotated((word * 0xCC9E2D51) & WORD, 15) * 0x1B873593) & WORD
    return (_rotated(value ^ word, 13) * 5 + 0xE6546B64) & WORD


def _rotated(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & WORD


def _shape_only(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    return seed.new_empty((seed.shape[0], col_indices.shape[0]), dtype=torch.uint32)
