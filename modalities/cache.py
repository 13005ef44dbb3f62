"""Encoded media kept in memory by id, since groups and epochs repeat them. Bounded in bytes, least recently used first
out.

It belongs to one process and holds read-only arrays.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from modalities.base import Encoded, Modality
from modalities.errors import CorruptMediaError, MediaError

_ENTRY_OVERHEAD_BYTES = 512
_PLUG_IN_ERRORS = (ValueError, TypeError, OSError, LookupError, ArithmeticError, RuntimeError, AttributeError)


class EncodedCache:
    """Maps media ids (`modalities.media.media_id`) to encoded arrays. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._entries: OrderedDict[str, tuple[Encoded, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, media_id: str) -> Encoded | None:
        """Return the arrays of an id, None if they are not in memory."""
        with self._lock:
            found = self._entries.get(media_id)
            self.num_hits += found is not None
            self.num_misses += found is None
            if found is None:
                return None
            self._entries.move_to_end(media_id)
            return found[0]

    def keep(self, media_id: str, encoded: Encoded) -> None:
        """Keep arrays that nobody writes into any more, if they fit."""
        for array in encoded.values():
            array.setflags(write=False)
        size = sum(_owned_bytes(array) for array in encoded.values()) + _ENTRY_OVERHEAD_BYTES
        if size > self.max_bytes:
            return
        with self._lock:
            if media_id in self._entries:
                return
            self._entries[media_id] = (encoded, size)
            self.num_bytes += size
            while self.num_bytes > self.max_bytes:
                _, (_, freed) = self._entries.popitem(last=False)
                self.num_bytes -= freed

    def encode(self, modality: Modality, data: bytes, media_id: str) -> Encoded:
        """Return `modality.encode(modality.decode(data))`, from memory if it is there.

        Raises:
            MediaError: the modality refused the bytes. What a modality of yours raises otherwise is wrapped into one.
        """
        encoded = self.get(media_id)
        if encoded is None:
            encoded = encode_media(modality, data)
            self.keep(media_id, encoded)
        return encoded


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
