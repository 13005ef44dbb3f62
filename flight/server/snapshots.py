"""The journal on the wire: its actions, and a snapshot of all tables as the bytes of the file, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from flight.broker import Broker
from flight.errors import InvalidRequestError
from flight.journal.broker import JournaledBroker
from flight.journal.transfer import snapshot_frames

PIECE_BYTES = 1 << 20

SNAPSHOT_SCHEMA = pa.schema(
    [
        pa.field(
            "bytes", pa.binary(), metadata={"meaning": "the next bytes of a snapshot file", "unit": "bytes"}
        )
    ]
)


def keeping_actions(broker: Broker) -> dict[str, Callable[[Any], Any]]:
    """Return what each action of the journal does, by name."""
    return {
        "journal": lambda _: broker.journal_stats(),
        "checkpoint_prepare": lambda r: _journaled(broker).prepare(r.checkpoint_id),
        "checkpoint_commit": lambda r: _journaled(broker).commit(r.checkpoint_id),
        "checkpoint_release": lambda r: _journaled(broker).release(r.checkpoint_id),
        "checkpoint_rewind": lambda r: _journaled(broker).rewind(r.checkpoint_id),
        "checkpoints": lambda _: _journaled(broker).kept_checkpoints(),
    }


def _journaled(broker: Broker) -> JournaledBroker:
    if not isinstance(broker, JournaledBroker):
        raise InvalidRequestError(
            "checkpoint: the server must have a journal, got one without; start it with --journal"
        )
    return broker


def snapshot_pieces(broker: Broker) -> Iterator[pa.RecordBatch]:
    """Yield the bytes of a snapshot; the tables are those of the moment when the first piece is asked for."""
    for parts in snapshot_frames(broker):
        whole = b"".join(parts)
        for start in range(0, len(whole), PIECE_BYTES):
            yield pa.record_batch([[whole[start : start + PIECE_BYTES]]], schema=SNAPSHOT_SCHEMA)
