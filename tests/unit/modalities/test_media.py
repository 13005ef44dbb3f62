"""Media as rows: ids of content and encoder, both forms, and hashes that readers check."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from modalities.errors import CorruptMediaError, DamagedMediaError, ModalityError
from modalities.image import Image
from modalities.media import MediaItem, MediaTable, content_hash, media_id
from modalities.registry import load_modalities
from tests.kit.media import LIMITS, PROFILE, film_bytes, picture_bytes, sound_bytes, tone

MODALITIES = load_modalities(PROFILE, LIMITS)


def item(name: str, data: bytes) -> MediaItem:
    modality = MODALITIES[name]
    return MediaItem(
        media_id=media_id(modality, data),
        modality=name,
        data=data,
        encoded=modality.encode(modality.decode(data)),
    )


@pytest.fixture(scope="module")
def items() -> list[MediaItem]:
    """Two pictures, a sound and a film."""
    return [
        item("image", picture_bytes()),
        item("audio", sound_bytes(tone())),
        item("video", film_bytes()),
        item("image", picture_bytes(70, 60, "JPEG")),
    ]


class _Newer(Image):
    version = 2


def test_id_is_made_of_bytes_and_encoder():
    """The same picture for another encoder, or one with other numbers, is another row; limits make no difference."""
    image, data = MODALITIES["image"], picture_bytes()
    assert media_id(image, data) == media_id(Image(PROFILE, replace(LIMITS, max_pixels=4096)), data)
    others = [
        media_id(image, picture_bytes(seed=1)),
        media_id(Image(replace(PROFILE, max_pixels=32 * 32), LIMITS), data),
        media_id(_Newer(PROFILE, LIMITS), data),
        media_id(MODALITIES["video"], data),
    ]
    assert len({media_id(image, data), *others}) == 5
    assert all(len(bytes.fromhex(each)) == 16 for each in others)


@pytest.mark.parametrize("keep", ["arrays", "bytes"])
def test_media_survive_the_table(items, keep: str):
    """Both forms give the same arrays, also from slices and pieces; each row holds one form only."""
    table = MediaTable(MODALITIES, keep)
    rows = table.to_arrow(items)
    assert rows.column_names == ["uid", *(column.name for column in table.columns())]
    assert [field.type for field in rows.schema][1:] == [column.type for column in table.columns()]
    assert ("data" in rows.column_names) == (keep == "bytes")
    pieces = pa.concat_tables([rows.slice(0, 1), rows.slice(1, 2), rows.slice(3)])
    for whole, start in ((rows, 0), (rows.slice(2), 2), (pieces, 0)):
        back = list(table.from_arrow(whole))
        assert [name for name, _ in back] == [each.media_id for each in items[start:]]
        for (_, encoded), expected in zip(back, items[start:], strict=True):
            assert content_hash(encoded) == content_hash(expected.encoded)


def _spoilt(array: pa.ListArray) -> pa.ListArray:
    """Return the same array with one bit of its first value turned over."""
    values = array.values.to_numpy().copy()
    values[0] ^= 1
    return pa.ListArray.from_arrays(array.offsets, pa.array(values), mask=array.is_null())


def test_damage_is_found_by_whoever_reads(items):
    """One bit of a patch, or of a file: the error names id, expected and got."""
    arrays, files = MediaTable(MODALITIES, "arrays"), MediaTable(MODALITIES, "bytes")
    rows = arrays.to_arrow(items)
    at = rows.column_names.index("image_patches")
    bad = rows.set_column(at, "image_patches", _spoilt(rows["image_patches"].chunk(0)))
    with pytest.raises(DamagedMediaError) as caught:
        list(arrays.from_arrow(bad))
    expected = content_hash(items[0].encoded)
    spoilt = items[0].encoded["patches"].copy()
    spoilt.reshape(-1)[0] ^= 1
    got = content_hash(items[0].encoded | {"patches": spoilt})
    assert str(caught.value) == (
        f"media {items[0].media_id}: content must hash to {expected}, got {got}; it was damaged after it was put"
    )
    stored = files.to_arrow(items[:1])
    data = bytearray(items[0].data)
    data[-1] ^= 1
    cut = stored.set_column(3, "data", pa.array([bytes(data)], pa.large_binary()))
    with pytest.raises(DamagedMediaError, match=f"^media {items[0].media_id}: content must hash to "):
        list(files.from_arrow(cut))
    emptied = rows.set_column(at, "image_patches", pa.nulls(4, rows["image_patches"].type))
    with pytest.raises(DamagedMediaError):
        list(arrays.from_arrow(emptied))


def test_media_of_an_encoder_that_is_not_loaded_are_refused(items):
    """The message says what to do."""
    rows = MediaTable(MODALITIES, "bytes").to_arrow(items[:1])
    with pytest.raises(ModalityError, match=r"modality must be one of .*, got 'image'; name its encoder in"):
        list(MediaTable({"audio": MODALITIES["audio"]}, "bytes").from_arrow(rows))


def test_file_that_the_reader_refuses_is_a_media_error():
    """With files in the table, decoding is the reader's; its limits count there too."""
    table = MediaTable(MODALITIES, "bytes")
    broken = MediaItem(media_id="ab", modality="image", data=b"no picture", encoded={})
    with pytest.raises(CorruptMediaError):
        list(table.from_arrow(table.to_arrow([broken])))


def test_hash_tells_names_types_and_shapes_apart():
    """The same bytes under another name, type or shape are something else."""
    values = np.zeros((2, 3), np.uint8)
    others = [
        {"b": values},
        {"a": values.reshape(3, 2)},
        {"a": values.astype(np.int8)},
        {"a": values, "b": np.zeros(0, np.uint8)},
        {"a": values.tobytes()},
    ]
    hashes = {content_hash(each) for each in ({"a": values}, *others)}
    assert len(hashes) == 6
    assert content_hash({"a": values[:, ::1]}) == content_hash({"a": np.asfortranarray(values)})


def test_a_table_keeps_arrays_or_bytes_and_nothing_else():
    """What a row holds is one of two words; the error says which."""
    with pytest.raises(ModalityError, match=r"keep must be one of \['bytes', 'arrays'\], got 'pixels'"):
        MediaTable(MODALITIES, "pixels")
