"""Media as rows of a table: one a file and encoder, under an id made of its content, with a hash of what is stored.

A row holds the file's bytes (`keep="bytes"`; the reader decodes and encodes them) or the encoded arrays
(`keep="arrays"`, in the columns of the modality). The same bytes have the same id wherever they come from; the same
bytes for another encoder, or for one with other numbers, have another. It knows no queue.

    id            BLAKE2b, 128 bits, of the encoder's identity and the file's bytes
    content_hash  XXH3, 128 bits, of what the row holds; every reader checks it
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from flight.schema import Column
from modalities.base import Encoded, Modality
from modalities.cache import encode_media
from modalities.errors import DamagedMediaError, ModalityError

KEPT = ("bytes", "arrays")
"""What a row of the table may hold of a file."""

ID_BYTES = 16
ID_TYPE = pa.string()
"""An id is 32 hexadecimal digits: the row's uid."""


@dataclass(frozen=True, kw_only=True)
class MediaItem:
    """One file and what its modality made of it."""

    media_id: str
    modality: str
    data: bytes
    encoded: Encoded

    @property
    def nbytes(self) -> int:
        """Return the bytes of the larger of its two forms."""
        return max(len(self.data), sum(array.nbytes for array in self.encoded.values()))


def media_id(modality: Modality, data: bytes) -> str:
    """Return the id of a file for an encoder: 32 hexadecimal digits."""
    identity = modality.identity().encode()
    digest = hashlib.blake2b(len(identity).to_bytes(8, "little") + identity, digest_size=ID_BYTES)
    digest.update(data)
    return digest.hexdigest()


class MediaTable:
    """How the media of a run lie in their table: its columns, rows in, rows out.

    Args:
        modalities: Encoders by name.
        keep: What a row holds: the file's `bytes`, or the `arrays` that they were made into.

    Raises:
        ModalityError: `keep` is something else.
    """

    def __init__(self, modalities: Mapping[str, Modality], keep: str) -> None:
        if keep not in KEPT:
            raise ModalityError(f"media: keep must be one of {list(KEPT)}, got {keep!r}")
        self._modalities = dict(modalities)
        self._keep = keep

    @property
    def are_views(self) -> bool:
        """Return whether arrays that are read lie in the memory of the answer; else they are made by the reader."""
        return self._keep == "arrays"

    def columns(self) -> tuple[Column, ...]:
        """Return the columns beside the uid, which is the id."""
        facts = (
            Column(
                name="modality",
                type=pa.string(),
                meaning="the modality that reads the file",
                writer="preprocess",
            ),
            Column(
                name="content_hash",
                type=pa.string(),
                meaning="XXH3 of what the row holds",
                unit="128 bits in hexadecimal",
                writer="preprocess",
            ),
        )
        if self._keep == "arrays":
            return (*facts, *(column for each in self._modalities.values() for column in each.columns()))
        data = Column(
            name="data", type=pa.large_binary(), meaning="the file", unit="bytes", writer="preprocess"
        )
        return (*facts, data)

    def to_arrow(self, items: Sequence[MediaItem]) -> pa.Table:
        """Return one row an item, with its id as uid."""
        hashes = [
            content_hash({"data": item.data} if self._keep == "bytes" else item.encoded) for item in items
        ]
        columns: dict[str, pa.Array] = {
            "uid": pa.array([item.media_id for item in items], ID_TYPE),
            "modality": pa.array([item.modality for item in items], pa.string()),
            "content_hash": pa.array(hashes, pa.string()),
        }
        if self._keep == "bytes":
            columns["data"] = pa.array([item.data for item in items], pa.large_binary())
            return pa.table(columns)
        for name, modality in self._modalities.items():
            columns |= modality.to_arrow([[item.encoded] if item.modality == name else [] for item in items])
        return pa.table(columns)

    def from_arrow(self, rows: pa.Table) -> Iterator[tuple[str, Encoded]]:
        """Yield each row's id and arrays, which are read-only views of the table's buffers if `are_views`.

        Raises:
            DamagedMediaError: what a row holds is not what was stored; the message names id, expected and got.
            ModalityError: a row is of a modality that is not loaded here.
        """
        kinds = rows["modality"].to_pylist()
        arrays = {}
        if self._keep == "arrays":
            arrays = {
                name: self._modalities[name].from_arrow(rows) for name in set(kinds) & set(self._modalities)
            }
        facts = zip(rows["uid"].to_pylist(), kinds, rows["content_hash"].to_pylist(), strict=True)
        for row, (uid, kind, expected) in enumerate(facts):
            if kind not in self._modalities:
                raise ModalityError(
                    f"media {uid}: modality must be one of {list(self._modalities)}, got {kind!r}; "
                    "name its encoder in modalities.extra"
                )
            if self._keep == "bytes":
                data = rows["data"][row].as_buffer()
                _check(uid, expected, content_hash({"data": data}))
                encoded = encode_media(self._modalities[kind], data.to_pybytes())
            else:
                items = arrays[kind][row]
                encoded = items[0] if len(items) == 1 else {}
                _check(uid, expected, content_hash(encoded))
            yield uid, encoded


def content_hash(stored: Mapping[str, np.ndarray | bytes | pa.Buffer]) -> str:
    """Return the hash of arrays or bytes by name: names, types, shapes and every byte count."""
    digest = xxhash.xxh3_128()
    for name in sorted(stored):
        value = stored[name]
        if isinstance(value, np.ndarray):
            digest.update(f"{name} {value.dtype.str} {value.shape}\n".encode())
            digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        else:
            digest.update(f"{name} {len(value)}\n".encode())
            digest.update(value)
    return digest.hexdigest()


def _check(uid: str, expected: str, got: str) -> None:
    if got != expected:
        raise DamagedMediaError(
            f"media {uid}: content must hash to {expected}, got {got}; it was damaged after it was put"
        )
