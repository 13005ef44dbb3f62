"""SGLang's wire format for tensors, written opcode by opcode: it is a Python pickle, and ours is write-only.

A bucket is `{"flattened_tensor": uint8 tensor, "metadata": [FlattenedTensorMetadata, ...]}`. The tensor's bytes are in
the payload itself: handles to shared memory would need the server to be our child, and it dies of those it cannot open.

Source: opcodes of the Python documentation of pickletools, protocol 4; classes that SGLang 0.5.21 admits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

MARK, STOP, REDUCE, NEWOBJ, BUILD = b"(", b".", b"R", b"\x81", b"b"
EMPTY_TUPLE, TUPLE, EMPTY_LIST, APPENDS, EMPTY_DICT, SETITEMS = b")", b"t", b"]", b"e", b"}", b"u"
NEWFALSE = b"\x89"


@dataclass(frozen=True)
class BucketEntry:
    """One tensor in a bucket: its checkpoint name, torch's name of its type, its shape, its bytes in the bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def flattened_bucket(storage: bytes, num_bytes: int, entries: Sequence[BucketEntry]) -> bytes:
    """Return the payload of `update_weights_from_tensor` with load format `flattened_bucket`, for one rank.

    Args:
        storage: What `torch.save` makes of the bucket's uint8 storage.
        num_bytes: Length of that storage.
        entries: The tensors in it.
    """
    loaded = _global("torch.storage", "_load_from_bytes") + _tuple(_bytes(storage)) + REDUCE
    hooks = _global("collections", "OrderedDict") + EMPTY_TUPLE + REDUCE
    parts = (loaded, _int(0), _tuple(_int(num_bytes)), _tuple(_int(1)), NEWFALSE, hooks)
    tensor = _global("torch._utils", "_rebuild_tensor_v2") + _tuple(*parts) + REDUCE
    metadata = EMPTY_LIST + MARK + b"".join(_metadata(entry) for entry in entries) + APPENDS
    return b"\x80\x04" + _dict({"flattened_tensor": tensor, "metadata": metadata}) + STOP


def _metadata(entry: BucketEntry) -> bytes:
    shape = _tuple(*(_int(size) for size in entry.shape))
    state = {
        "name": _text(entry.name),
        "shape": _global("torch", "Size") + _tuple(shape) + REDUCE,
        "dtype": _global("torch", entry.dtype),
        "start_idx": _int(entry.start),
        "end_idx": _int(entry.end),
        "numel": _int(entry.end - entry.start),
    }
    kind = _global("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
    return kind + EMPTY_TUPLE + NEWOBJ + _dict(state) + BUILD


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _tuple(*items: bytes) -> bytes:
    return MARK + b"".join(items) + TUPLE


def _dict(items: dict[str, bytes]) -> bytes:
    return EMPTY_DICT + MARK + b"".join(_text(key) + value for key, value in items.items()) + SETITEMS


def _int(value: int) -> bytes:
    return b"\x8a" + bytes([8]) + struct.pack("<q", value)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _bytes(value: bytes) -> bytes:
    return b"\x8e" + struct.pack("<Q", len(value)) + value
