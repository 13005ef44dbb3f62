"""Encoded media in memory: found by id, bounded in bytes."""

from __future__ import annotations

import numpy as np
import pytest

from modalities.cache import EncodedCache, encode_media
from modalities.errors import CorruptMediaError
from modalities.image import Image
from tests.kit.media import LIMITS, PROFILE, picture_bytes


class _Clumsy(Image):
    """A modality whose author did not think of short files."""

    def decode(self, data: bytes) -> np.ndarray:
        return np.zeros((data[100], 8, 3), np.uint8)


def test_cache_encodes_the_same_bytes_once() -> None:
    """The second time the same arrays come back, read-only, and nothing is decoded."""
    cache, image = EncodedCache(1 << 20), Image(PROFILE, LIMITS)
    first = cache.encode(image, picture_bytes(), "a")
    assert cache.encode(image, b"not looked at", "a") is first
    assert cache.get("b") is None
    assert (cache.num_hits, cache.num_misses, len(cache)) == (1, 2, 1)
    assert not any(array.flags.writeable for array in first.values())


def test_cache_drops_what_was_not_used_for_longest() -> None:
    """Room for two pictures: the one that was asked for again stays."""
    image = Image(PROFILE, LIMITS)
    size = sum(array.nbytes for array in image.encode(image.decode(picture_bytes())).values()) + 512
    cache = EncodedCache(2 * size)
    for media_id in ("first", "second", "first", "third"):
        cache.encode(image, picture_bytes(), media_id)
    hits = cache.num_hits
    cache.encode(image, picture_bytes(), "first")
    assert (cache.num_hits, len(cache)) == (hits + 1, 2)
    cache.encode(image, picture_bytes(), "second")
    assert cache.num_hits == hits + 1
    assert cache.num_bytes <= cache.max_bytes


def test_cache_keeps_nothing_that_is_larger_than_itself() -> None:
    """A cache of no size is a cache turned off."""
    cache = EncodedCache(0)
    cache.encode(Image(PROFILE, LIMITS), picture_bytes(), "a")
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_cache_wraps_what_a_modality_raises_by_accident() -> None:
    """A plug-in that breaks on a file costs that row, not the service."""
    with pytest.raises(CorruptMediaError) as caught:
        encode_media(_Clumsy(PROFILE, LIMITS), b"short")
    assert str(caught.value) == "image must decode, got IndexError: index out of range"
