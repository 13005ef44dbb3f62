"""Media between a service and the table `media`: put once, read once, found by id. It decodes nothing by itself.

A producer asks which ids are not there and puts those, then the rows that refer to them; a consumer keeps what it has
read, so that the media of a group, of prompts that share a file and of later epochs cross the bus once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa

from flight.client import QueueClient
from flight.errors import MissingReferencesError
from modalities.base import Encoded, tower_of
from modalities.cache import EncodedCache
from modalities.media import MediaItem, MediaTable
from relax.errors import ServiceError

TABLE = "media"
MAX_ROUNDS = 5
"""How often a put is begun anew because media went away between the question and the put."""

MAX_SHOWN = 3


class MediaWriter:
    """Puts rows and the media that they refer to, bytes of which travel only if the table lacks them."""

    def __init__(self, queue: QueueClient, media: MediaTable, *, writer: str) -> None:
        self._queue = queue
        self._media = media
        self._writer = writer

    def put(self, table: str, rows: pa.Table, items: Iterable[MediaItem], *, deadline_s: float) -> None:
        """Put rows of a table that refer to `items`; idempotent by uid and id.

        Raises:
            DeadlineExceededError: there is no room for the media or the rows.
            MissingReferencesError: media went away each time that they were put.
        """
        by_id = {item.media_id: item for item in items}
        for is_last in (*[False] * (MAX_ROUNDS - 1), True):
            self._put_missing(by_id, deadline_s)
            try:
                self._queue.put(table, rows, writer=self._writer, deadline_s=deadline_s)
            except MissingReferencesError:
                if is_last:
                    raise
            else:
                return

    def _put_missing(self, by_id: dict[str, MediaItem], deadline_s: float) -> None:
        missing = self._queue.missing(TABLE, list(by_id)) if by_id else []
        if missing:
            rows = self._media.to_arrow([by_id[each] for each in missing])
            self._queue.put(TABLE, rows, writer=self._writer, deadline_s=deadline_s)


class MediaReader:
    """Encoded media by id: from memory, else read from the table and checked. Not for several threads.

    Args:
        read: Returns the rows of the given ids that are there, all columns.
        media: How rows hold media.
        max_bytes: Arrays kept in memory.
    """

    def __init__(self, read: Callable[[list[str]], pa.Table], media: MediaTable, *, max_bytes: int) -> None:
        self.cache = EncodedCache(max_bytes)
        self.num_reads = 0
        """Rows read from the table so far."""
        self._read = read
        self._media = media

    def by_tower(self, media_ids: Sequence[Sequence[str] | None]) -> list[dict[str, list[Encoded]]]:
        """Return the media of each row by tower, in the order of its ids.

        Raises:
            ServiceError: an id is not in the table.
            DamagedMediaError: a row is not what was put.
        """
        wanted = dict.fromkeys(each for row in media_ids for each in row or ())
        found: dict[str, Encoded] = {}
        for each in wanted:
            kept = self.cache.get(each)
            if kept is not None:
                found[each] = kept
        found |= self._fetch([each for each in wanted if each not in found])
        rows: list[dict[str, list[Encoded]]] = []
        for row in media_ids:
            media: dict[str, list[Encoded]] = {}
            for each in row or ():
                media.setdefault(tower_of(found[each]), []).append(found[each])
            rows.append(media)
        return rows

    def _fetch(self, media_ids: list[str]) -> dict[str, Encoded]:
        if not media_ids:
            return {}
        rows = self._read(media_ids)
        self.num_reads += rows.num_rows
        found = {each: self._taken(each, encoded) for each, encoded in self._media.from_arrow(rows)}
        missing = [each for each in media_ids if each not in found]
        if missing:
            raise ServiceError(
                f"media: table {TABLE!r} must have every id that a row refers to, got {len(missing)} that it lacks: "
                f"{missing[:MAX_SHOWN]}; it must be the table of the same run"
            )
        return found

    def _taken(self, media_id: str, encoded: Encoded) -> Encoded:
        num_bytes = sum(array.nbytes for array in encoded.values())
        if self._media.are_views and num_bytes <= self.cache.max_bytes:
            # A view would keep the whole answer it came in, memory that it shares with the server included.
            encoded = {name: np.array(array) for name, array in encoded.items()}
        self.cache.keep(media_id, encoded)
        return encoded
