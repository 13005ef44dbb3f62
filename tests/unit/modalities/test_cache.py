"""Encoded media in memory: found by content, bounded in bytes."""

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
    """The second time the same arrays come back, read-only."""
    cache, image = EncodedCache(1 << 20), Image(PROFILE, LIMITS)
    first = cache.encode(image, picture_bytes())
    assert cache.encode(image, picture_bytes()) is first
    assert (cache.num_hits, cache.num_misses, len(cache)) == (1, 1, 1)
    assert not any(array.flags.writeable for array in first.values())


def test_cache_drops_what_was_not_used_for_longest() -> None:
    """Room for two pictures: the one that was asked for again stays."""
    image = Image(PROFILE, LIMITS)
    size = sum(array.nbytes for array in image.encode(image.decode(picture_bytes())).values()) + 512
    cache = EncodedCache(2 * size)
    first, second, third = (picture_bytes(seed=seed) for seed in range(3))
    for data in (first, second, first, third):
        cache.encode(image, data)
    hits = cache.num_hits
    cache.encode(image, first)
    assert (cache.num_hits, len(cache)) == (hits + 1, 2)
    cache.encode(image, second)
    assert cache.num_hits == hits + 1
    assert cache.num_bytes <= cache.max_bytes


def test_cache_keeps_nothing_that_is_larger_than_itself() -> None:
    """A cache of no size is a cache turned off."""
    cache = EncodedCache(0)
    cache.encode(Image(PROFILE, LIMITS), picture_bytes())
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_cache_wraps_what_a_modality_raises_by_accident() -> None:
    """A plug-in that breaks on a file costs that row, not the service."""
    with pytest.raises(CorruptMediaError) as caught:
        encode_media(_Clumsy(PROFILE, LIMITS), b"short")
    assert str(caught.value) == "image must decode, got IndexError: index out of range"
