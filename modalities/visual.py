"""What pictures and films share: target size, patches, columns. Pure numpy and pyarrow; no decoder is imported.

Letters in shapes: T frames, H height, W width, C colours (3), N patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from flight.schema import Column
from modalities.base import Encoded, Modality, num_encoded_tokens
from modalities.errors import CorruptMediaError, ModalityError
from modalities.packing import pack_list, pack_triples, unpack_list
from modalities.profile import EncodingProfile

MAX_ASPECT_RATIO = 200


def fit_size(height: int, width: int, factor: int, min_pixels: float, max_pixels: float) -> tuple[int, int]:
    """Return the height and width to resize to: multiples of `factor` whose product lies in the given range.

    Source: the `smart_resize` rule of the Qwen-VL processors.

    Raises:
        CorruptMediaError: one edge is more than 200 times the other.
    """
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise CorruptMediaError(
            f"aspect ratio must be at most {MAX_ASPECT_RATIO}, got {ratio:.0f} ({width}x{height} px); crop it"
        )
    fitted = round(height / factor) * factor, round(width / factor) * factor
    if fitted[0] * fitted[1] > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return _whole(height / shrink, factor, math.floor), _whole(width / shrink, factor, math.floor)
    if fitted[0] * fitted[1] < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        return _whole(height * grow, factor, math.ceil), _whole(width * grow, factor, math.ceil)
    return fitted


def _whole(edge: float, factor: int, rounded: Callable[[float], int]) -> int:
    return max(factor, rounded(edge / factor) * factor)


def patchify(frames_THWC: np.ndarray, profile: EncodingProfile) -> Encoded:
    """Cut frames into flattened patches in the order of the model's processor.

    Patches that merge into one token are neighbours. If T is no multiple of the temporal patch, the last frame is
    repeated; a picture is T = 1.

    Shapes: frames uint8 [T, H, W, 3], H and W multiples of patch * merge; patches uint8
    [N, 3 * temporal_patch * patch * patch]; grid_thw int32 [3], in patches.
    """
    patch, merge, temporal = profile.patch_size, profile.merge_size, profile.temporal_patch_size
    missing = -len(frames_THWC) % temporal
    if missing:
        frames_THWC = np.concatenate([frames_THWC, np.repeat(frames_THWC[-1:], missing, axis=0)])
    num_frames, height, width, _ = frames_THWC.shape
    grid_t, grid_h, grid_w = num_frames // temporal, height // patch, width // patch
    blocks = frames_THWC.reshape(
        grid_t, temporal, grid_h // merge, merge, patch, grid_w // merge, merge, patch, frames_THWC.shape[3]
    )
    patches = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(
        grid_t * grid_h * grid_w, profile.patch_values
    )
    return {"patches": patches, "grid_thw": np.array([grid_t, grid_h, grid_w], np.int32)}


class VisualModality(Modality):
    """Columns and token counts of everything that is made of patches. Subclasses decode and encode."""

    def columns(self) -> tuple[Column, ...]:
        values = self.profile.patch_values
        return (
            Column(
                name=f"{self.name}_patches",
                type=pa.list_(pa.uint8()),
                meaning=f"patches of all {self.name} items of the row before normalisation, row-major",
                unit="0 to 255",
                shape=f"[num_patches, {values}]",
                writer="preprocess",
                nullable=True,
            ),
            Column(
                name=f"{self.name}_grid_thw",
                type=pa.list_(pa.list_(pa.int32(), 3)),
                meaning=f"time, height and width of each {self.name} item",
                unit="patches",
                shape="[num_items, 3]",
                writer="preprocess",
                nullable=True,
            ),
        )

    def num_tokens(self, encoded: Encoded) -> int:
        return num_encoded_tokens(self.tower, encoded, self.profile)

    def to_arrow(self, rows: Sequence[Sequence[Encoded]]) -> dict[str, pa.Array]:
        return {
            f"{self.name}_patches": pack_list(
                [[item["patches"] for item in row] for row in rows], pa.uint8()
            ),
            f"{self.name}_grid_thw": pack_triples([[item["grid_thw"] for item in row] for row in rows]),
        }

    def from_arrow(self, columns: pa.Table | pa.RecordBatch) -> list[list[Encoded]]:
        flat = unpack_list(columns[f"{self.name}_patches"])
        grids = unpack_list(columns[f"{self.name}_grid_thw"])
        return [self._items(values, grid) for values, grid in zip(flat, grids, strict=True)]

    def _items(self, values: np.ndarray | None, grids: np.ndarray | None) -> list[Encoded]:
        if values is None or grids is None:
            return []
        grids_thw = grids.reshape(-1, 3)
        counts = grids_thw.prod(axis=1, dtype=np.int64)
        if int(counts.sum()) * self.profile.patch_values != len(values):
            raise ModalityError(
                f"{self.name}_patches must hold {int(counts.sum())} patches of {self.profile.patch_values} values, "
                f"got {len(values)} values; the row was encoded for another model"
            )
        patches = np.split(values.reshape(-1, self.profile.patch_values), np.cumsum(counts)[:-1])
        return [{"patches": patch, "grid_thw": grid} for patch, grid in zip(patches, grids_thw, strict=True)]
