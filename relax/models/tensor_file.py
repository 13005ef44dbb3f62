"""The bytes of a safetensors file, laid out in one buffer that belongs to nobody else.

A buffer is made while the weights stand still and written later, while they are trained on. Tensors lie in falling
order of their item size, so that each is aligned.

Source: the safetensors format, 8 bytes of length, a JSON header padded by spaces, then the tensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 8
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def file_bytes(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the file, uint8 [num_bytes] in host memory, with copies of the tensors, which may be on a device.

    Raises:
        ValueError: A tensor is of a type that the format does not know.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in TYPES:
            raise ValueError(f"file_bytes: {name} must be of a type in safetensors, got {tensor.dtype}")
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    told = json.dumps(header, separators=(",", ":")).encode()
    told += b" " * (-len(told) % ALIGNMENT)
    first = 8 + len(told)
    buffer = torch.empty(first + end, dtype=torch.uint8)
    buffer[:first] = torch.frombuffer(bytearray(struct.pack("<Q", len(told)) + told), dtype=torch.uint8)
    at = first
    for name in names:
        tensor = tensors[name].detach()
        place = buffer[at : at + tensor.nbytes]
        at += tensor.nbytes
        if tensor.numel():
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return buffer
