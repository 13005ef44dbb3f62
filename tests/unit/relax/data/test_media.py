"""What a reader of media keeps in memory, and what it asks the table for."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from modalities.media import MediaItem, MediaTable
from modalities.registry import load_modalities
from relax.data.media import MediaReader
from tests.kit.media import LIMITS, PROFILE

TABLE = MediaTable(load_modalities(PROFILE, LIMITS), "arrays")
NUM_PATCHES = 16
ITEM_BYTES = NUM_PATCHES * PROFILE.patch_values + 12 + 512
"""Arrays of one item, and what an entry of the cache counts beside them."""


def stored(count: int) -> pa.Table:
    """Return rows `m0`, `m1` and so on, whose patches are their number."""
    items = [
        MediaItem(
            media_id=f"m{number}",
            modality="image",
            data=b"",
            encoded={
                "patches": np.full((NUM_PATCHES, PROFILE.patch_values), number, np.uint8),
                "grid_thw": np.array([1, 4, 4], np.int32),
            },
        )
        for number in range(count)
    ]
    return TABLE.to_arrow(items)


class Source:
    """A fake of the queue's `read`: notes what it was asked for."""

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows
        self.asked: list[list[str]] = []

    def read(self, ids: list[str]) -> pa.Table:
        self.asked.append(ids)
        return self.rows.filter(pc.is_in(self.rows["uid"], pa.array(ids)))


def test_reader_asks_once_for_what_it_does_not_have():
    """A group's rows, and rows that share a file, are one question; null and no media are none."""
    source = Source(stored(3))
    reader = MediaReader(source.read, TABLE, max_bytes=10 * ITEM_BYTES)
    rows = reader.by_tower([["m1", "m0"], None, [], *[["m0"]] * 16])
    assert source.asked == [["m1", "m0"]]
    assert [int(each["patches"][0, 0]) for each in rows[0]["image"]] == [1, 0]
    assert (rows[1], rows[2]) == ({}, {})
    reader.by_tower([["m0", "m2"]])
    assert source.asked == [["m1", "m0"], ["m2"]]
    reader.by_tower([["m0", "m1", "m2"]])
    assert len(source.asked) == 2
    assert reader.num_reads == 3


def test_reader_keeps_copies_of_few_bytes_and_views_of_none():
    """What is kept does not hold the answer that it came in; what is too large to keep is not copied."""
    source = Source(stored(3))
    reader = MediaReader(source.read, TABLE, max_bytes=2 * ITEM_BYTES)
    (media,) = reader.by_tower([["m0", "m1", "m2"]])
    assert len(reader.cache) == 2
    assert reader.cache.num_bytes <= 2 * ITEM_BYTES
    assert all(each["patches"].base is None for each in media["image"])
    reader.by_tower([["m2", "m0"]])
    assert source.asked[1:] == [["m0"]]
    (views,) = MediaReader(source.read, TABLE, max_bytes=0).by_tower([["m0"]])
    assert views["image"][0]["patches"].base is not None


@pytest.mark.parametrize("order", [["m2", "m0", "m1"], ["m0", "m0"]])
def test_reader_returns_media_in_the_order_of_the_ids(order):
    """The table's order is of no concern, and an id may come twice."""
    reader = MediaReader(Source(stored(3)).read, TABLE, max_bytes=0)
    (media,) = reader.by_tower([order])
    assert [f"m{each['patches'][0, 0]}" for each in media["image"]] == order
