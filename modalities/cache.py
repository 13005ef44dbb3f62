"""Encoded media kept in memory by content, since epochs repeat them. Bounded in bytes, least recently used first out.

It belongs to one process, is filled with one profile, and holds read-only arrays.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

import numpy as np

from modalities.base import Encoded, Modality
from modalities.errors import CorruptMediaError, MediaError

_DIGEST_BYTES = 20
_ENTRY_OVERHEAD_BYTES = 512
_PLUG_IN_ERRORS = (ValueError, TypeError, OSError, LookupError, ArithmeticError, RuntimeError, AttributeError)


class EncodedCache:
    """Maps modality name and content to encoded arrays. Thread-safe; the same bytes may be encoded twice at once."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._entries: OrderedDict[tuple[str, bytes], tuple[Encoded, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def encode(self, modality: Modality, data: bytes) -> Encoded:
        """Return `modality.encode(modality.decode(data))`, from memory if these bytes were seen.

        Raises:
            MediaError: the modality refused the bytes. What a modality of yours raises otherwise is wrapped into one.
        """
        key = (modality.name, content_digest(data))
        with self._lock:
            if found := self._entries.get(key):
                self._entries.move_to_end(key)
                self.num_hits += 1
                return found[0]
            self.num_misses += 1
        encoded = encode_media(modality, data)
        for array in encoded.values():
            array.setflags(write=False)
        self._keep(key, encoded)
        return encoded

    def _keep(self, key: tuple[str, bytes], encoded: Encoded) -> None:
        size = sum(_owned_bytes(array) for array in encoded.values()) + _ENTRY_OVERHEAD_BYTES
        if size > self.max_bytes:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = (encoded, size)
            self.num_bytes += size
            while self.num_bytes > self.max_bytes:
                _, (_, freed) = self._entries.popitem(last=False)
                self.num_bytes -= freed


def content_digest(data: bytes) -> bytes:
    """Return the content address of `data`: BLAKE2b, 20 bytes."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def encode_media(modality: Modality, data: bytes) -> Encoded:
    """Decode and encode; every failure is a MediaError.

    Raises:
        MediaError: the modality refused the bytes, or broke on them.
    """
    try:
        return modality.encode(modality.decode(data))
    except MediaError:
        raise
    except _PLUG_IN_ERRORS as error:
        raise CorruptMediaError(
            f"{modality.name} must decode, got {type(error).__name__}: {error}"
        ) from error


def _owned_bytes(array: np.ndarray) -> int:
    """Bytes kept alive by `array`: those of the buffer that it is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.nbytes
