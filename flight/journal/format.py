"""Frames: what each file of a journal is made of. It knows no decisions.

    offset  size
         0     4  magic "RxJ1"
         4     1  kind
         5     3  zero
         8     4  bytes of the head
        12     4  zero
        16     8  bytes of the body
        24     8  number of the decision
        32     8  number of the first decision that was written together with it
        40     8  xxh3-64 of the 40 bytes before, the head and the body
        48        head (msgpack), zeros up to a multiple of 64, body (Arrow or msgpack), zeros up to a multiple of 64

All integers are little-endian. Frames start at multiples of 64, so that a body can be used where it lies and a reader
finds the next frame behind a damaged one. Arrow IPC has no checksums, and a stream that is cut between two
messages looks whole: hence the frames.

Source: xxh3 is https://github.com/Cyan4973/xxHash.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import xxhash

MAGIC = b"RxJ1"
FORMAT = 1
"""Version of the format; a reader refuses a newer one and reads all older ones."""

ALIGNMENT_BYTES = 64
MAX_HEAD_BYTES = 64 << 20

_FIXED = struct.Struct("<4sB3xI4xQQQ")
_CHECKSUM = struct.Struct("<Q")
FIXED_BYTES = _FIXED.size + _CHECKSUM.size

Buffer = bytes | memoryview


class Kind(IntEnum):
    """What a frame holds."""

    HEADER = 1
    """The first frame of a file: format, journal, what the file is."""
    SCHEMA = 2
    """An Arrow schema that later frames refer to by its number."""
    DECISION = 3
    PUT = 4
    """A decision with the rows that were put."""
    ROWS = 5
    """Live rows that compaction moved; they look like those of a put."""
    TABLE = 6
    """A table of a checkpoint."""
    EXTENTS = 7
    """Where values lie that a checkpoint refers to."""
    END = 8
    """The last frame of a checkpoint: without it the file is not one."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that was read; `head` and `body` look into the file."""

    kind: Kind
    seq: int
    first: int
    offset: int
    end: int
    head: memoryview
    body: memoryview


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are not a frame."""

    offset: int
    what: str


def frame(kind: Kind, seq: int, first: int, head: Buffer, body: Any = b"") -> list[Any]:
    """Return the buffers of a frame, in order; a body (any contiguous buffer) is not copied."""
    num_body = memoryview(body).nbytes
    fixed = _FIXED.pack(MAGIC, kind, len(head), num_body, seq, first)
    checksum = xxhash.xxh3_64(fixed)
    checksum.update(head)
    if num_body:
        checksum.update(body)
    head_end = FIXED_BYTES + len(head)
    parts = [fixed + _CHECKSUM.pack(checksum.intdigest()) + head + bytes(-head_end % ALIGNMENT_BYTES)]
    if num_body:
        parts.append(body)
        if num_body % ALIGNMENT_BYTES:
            parts.append(bytes(-num_body % ALIGNMENT_BYTES))
    return parts


def read_frame(data: memoryview, offset: int) -> Frame | Damage:
    """Read the frame at an offset of a file's bytes."""
    if len(data) - offset < FIXED_BYTES:
        return Damage(offset, "the file ends inside a frame")
    magic, kind, num_head, num_body, seq, first = _FIXED.unpack_from(data, offset)
    if magic != MAGIC or num_head > MAX_HEAD_BYTES:
        return Damage(offset, "no frame begins here")
    head_at = offset + FIXED_BYTES
    body_at = _aligned(head_at + num_head)
    end = _aligned(body_at + num_body)
    if body_at + num_body > len(data):
        return Damage(offset, "the file ends inside a frame")
    head, body = data[head_at : head_at + num_head], data[body_at : body_at + num_body]
    checksum = xxhash.xxh3_64(data[offset : offset + _FIXED.size])
    checksum.update(head)
    checksum.update(body)
    (expected,) = _CHECKSUM.unpack_from(data, offset + _FIXED.size)
    if checksum.intdigest() != expected:
        return Damage(offset, "the checksum is wrong")
    try:
        return Frame(Kind(kind), seq, first, offset, end, head, body)
    except ValueError:
        return Damage(offset, f"frames of kind {kind} are unknown to this release")


def read_frames(data: memoryview, offset: int = 0) -> Iterator[Frame | Damage]:
    """Yield the frames of a file from an offset on; a damaged place comes as `Damage`, then what is found behind it."""
    while offset < len(data):
        found = read_frame(data, offset)
        yield found
        if isinstance(found, Frame):
            offset = found.end
            continue
        offset += ALIGNMENT_BYTES
        while offset < len(data) and not isinstance(read_frame(data, offset), Frame):
            offset = _next_magic(data, offset + 1)


def _next_magic(data: memoryview, offset: int) -> int:
    """Return the next aligned place, from `offset` on, where a frame may begin; the end if there is none."""
    step = 1 << 20
    start = _aligned(offset)
    while start < len(data):
        window = bytes(data[start : start + step])
        at = window.find(MAGIC)
        while at >= 0:
            if at % ALIGNMENT_BYTES == 0:
                return start + at
            at = window.find(MAGIC, at + 1)
        start += step
    return len(data)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
