"""Recorded media: each id once, in types that any reader of Parquet understands."""

from __future__ import annotations

import numpy as np
import pandas as pd

from modalities.media import MediaItem, MediaTable, media_id
from modalities.registry import load_modalities
from relax.observe.media_recorder import MediaRecorder
from tests.kit.media import LIMITS, PROFILE, picture_bytes, sound_bytes, tone

MODALITIES = load_modalities(PROFILE, LIMITS)


def items() -> list[MediaItem]:
    files = [("image", picture_bytes()), ("audio", sound_bytes(tone())), ("image", picture_bytes(70, 60))]
    return [
        MediaItem(
            media_id=media_id(MODALITIES[name], data),
            modality=name,
            data=data,
            encoded=MODALITIES[name].encode(MODALITIES[name].decode(data)),
        )
        for name, data in files
    ]


def test_media_are_recorded_once_an_id(tmp_path):
    """Also when they are delivered again, and to a recorder that was started anew."""
    rows = MediaTable(MODALITIES, "bytes").to_arrow(items())
    recorder = MediaRecorder(tmp_path)
    assert recorder.write(rows.slice(0, 2)) == 2
    assert recorder.write(rows) == 1
    assert MediaRecorder(tmp_path).write(rows) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000.parquet", "000001.parquet"]
    found = pd.read_parquet(tmp_path).set_index("media_id")
    assert {name: row["data"] for name, row in found.iterrows()} == {
        each.media_id: each.data for each in items()
    }


def test_arrays_are_recorded_as_bytes_and_numbers(tmp_path):
    """Patches are one binary value, from slices too; numpy gives them back."""
    rows = MediaTable(MODALITIES, "arrays").to_arrow(items())
    recorder = MediaRecorder(tmp_path)
    recorder.write(rows.slice(2))
    recorder.write(rows)
    found = pd.read_parquet(tmp_path).set_index("media_id")
    for each in items():
        row = found.loc[each.media_id]
        if each.modality == "image":
            patches = np.frombuffer(row["image_patches"], np.uint8).reshape(each.encoded["patches"].shape)
            assert np.array_equal(patches, each.encoded["patches"])
            assert row["image_grid_thw"][0].tolist() == each.encoded["grid_thw"].tolist()
        else:
            assert row["image_patches"] is None
            assert len(row["audio_features"]) == each.encoded["features"].size
