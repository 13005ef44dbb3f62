"""Brokers with a journal under a clock that tests move, their state as plain data, and a disk that can be full.

`HastyDisk` is a fake that does not wait for the disk; of its kind, `GatedDisk` waits for a gate that the test opens,
`SmallDisk` has room for so many bytes only, and `StatelessDisk` takes no checkpoint.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from flight.broker import ReadRequest, Wait
from flight.data.spill import SpillDirectory
from flight.journal.broker import JournaledBroker
from flight.journal.checkpoint import capture
from flight.journal.config import JournalConfig
from flight.journal.directory import Disk
from flight.journal.replay import ReplayingBroker
from flight.schema import Column, ConsumerSpec, TableSpec
from tests.kit.clock import FakeClock

NOW = Wait(deadline=0.0)
_SERVERS = itertools.count(1)


class HastyDisk(Disk):
    """A fake disk: files are real, but nobody waits for them to be on it; it counts how often somebody would."""

    num_syncs = 0

    def sync(self, descriptor: int) -> None:
        """Count."""
        self.num_syncs += 1

    def sync_names(self, descriptor: int) -> None:
        """Do nothing."""


class GatedDisk(HastyDisk):
    """A fake disk whose syncs wait for a gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.has_come = threading.Event()

    def sync(self, descriptor: int) -> None:
        """Wait for the gate."""
        self.has_come.set()
        if not self.gate.wait(20.0):
            raise OSError("the test must open the gate")
        super().sync(descriptor)


class SmallDisk(HastyDisk):
    """A fake disk: files are real, but `left` bytes are all that may still be written."""

    def __init__(self, left: int = 1 << 40) -> None:
        self.left = left
        self.free = 1 << 40
        """What it says that it has room for; a quota says more than there is."""

    def free_bytes(self, path: Path) -> int:
        """Return what it says."""
        return self.free

    def write(self, descriptor: int, buffers: Sequence[Any]) -> None:
        """Write, or leave half of it behind and fail."""
        num_bytes = sum(map(len, buffers))
        if num_bytes > self.left:
            os.write(descriptor, bytes(min(self.left, 100)))
            raise OSError(errno.ENOSPC, "No space left on device")
        self.left -= num_bytes
        super().write(descriptor, buffers)

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        """Take room, which is not counted."""
        if num_bytes > self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().allocate(descriptor, num_bytes)


class StatelessDisk(HastyDisk):
    """A fake disk on which no state file can be made while it is `without`."""

    without = False

    def create(self, path: Path) -> int:
        """Refuse."""
        if self.without and ".state" in path.name:
            raise OSError(5, "Input/output error")
        return super().create(path)


def open_journal(
    path: Path,
    clock: FakeClock | None = None,
    *,
    wall: FakeClock | None = None,
    disk: Disk | None = None,
    spill: SpillDirectory | None = None,
    **settings: Any,
) -> JournaledBroker:
    """Return a broker on a directory, as a server that starts would."""
    clock = clock or FakeClock()
    config = JournalConfig(directory=str(path), **settings)
    return JournaledBroker(
        config,
        disk=disk or HastyDisk(),
        wall=wall or clock,
        spill=spill,
        clock=clock,
        lease_prefix=f"server{next(_SERVERS)}-",
    )


def plain_spec(**changes: Any) -> TableSpec:
    """Return a table of one column and one consumer."""
    values: dict[str, Any] = {
        "name": "rows",
        "columns": (Column(name="x", type=pa.string(), meaning="a value"),),
        "consumers": (ConsumerSpec(name="reader", columns=("x",)),),
        "fsync": "batch",
    }
    return TableSpec(**values | changes)


def media_specs(age_s: float | None = 40.0) -> tuple[TableSpec, TableSpec]:
    """Return a table of media and one whose rows refer to it, in two parts."""
    pixels = Column(name="pixels", type=pa.binary(), meaning="pixels")
    keyed = ConsumerSpec(name="viewer", columns=("pixels",), sampler="keyed")
    ids, masks = (
        Column(
            name=name,
            type=arrow_type,
            meaning="media",
            writer=writer,
            nullable=True,
            references="media",
        )
        for name, arrow_type, writer in (
            ("media_ids", pa.list_(pa.string()), "preprocess"),
            ("mask_id", pa.string(), "judge"),
        )
    )
    reader = ConsumerSpec(name="reader", columns=("media_ids",))
    return (
        plain_spec(name="media", columns=(pixels,), consumers=(keyed,), max_age_s=age_s),
        plain_spec(name="prompts", columns=(ids, masks), consumers=(reader,), max_attempts=2),
    )


def plain_rows(*uids: str) -> pa.RecordBatch:
    """Return rows whose values tell which they are."""
    return pa.record_batch({"uid": list(uids), "x": [f"value of {uid}" for uid in uids]})


def media_rows(*uids: str) -> pa.RecordBatch:
    """Return media whose pixels are their uids."""
    return pa.record_batch({"uid": list(uids), "pixels": [uid.encode() for uid in uids]})


def prompt_rows(**refers: list[str]) -> pa.RecordBatch:
    """Return rows by uid, each with what it refers to."""
    ids = pa.array(list(refers.values()), pa.list_(pa.string()))
    return pa.record_batch({"uid": list(refers), "media_ids": ids})


def crashed(path: Path, to: Path) -> Path:
    """Copy a directory as a server that is killed now would leave it."""
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(path, to, ignore=lambda _, names: {"lock", "reserve"} & set(names)))


def state_of(broker: ReplayingBroker) -> dict[str, Any]:
    """Return all that a broker knows, values included, in a form in which equal states are equal."""
    tables = {}
    for record in capture(broker.ledger, broker.created):
        plain = msgspec.to_builtins(record, enc_hook=str)
        for cursor in plain["state"]["cursors"].values():
            tried = zip(cursor.pop("tried_row_ids"), cursor.pop("tried_attempts"), strict=True)
            cursor["tried"] = dict(tried)
        name = record.definitions[-1].table
        plain["values"] = broker.read(name, ReadRequest()).to_pylist()
        plain["references"] = references_of(broker, name)
        plain["state"]["counts"].pop("duplicates", None)  # A put that changes nothing is not written down.
        tables[name] = plain
    return tables


def references_of(broker: ReplayingBroker, name: str) -> dict[str, Any]:
    """Return what refers to the rows of a table, and which wait for the first that does."""
    references, table = broker.ledger.references, broker.ledger.tables[name]
    return {
        "awaiting": None if table.unreferenced is None else list(table.unreferenced),
        "counts": {row.uid: references.counts.count(name, row.uid) for row in table.rows.values()},
        "referring": sorted(references.counts.rows_of(name)),
    }


def rebuilt(broker: ReplayingBroker) -> ReplayingBroker:
    """Return the state of a broker, leases ended, through a checkpoint and without any log; it has no values."""
    other = ReplayingBroker(clock=broker.clock)
    records = capture(broker.ledger, broker.created)
    other.restore_tables(
        [msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=type(record)) for record in records]
    )
    other.void_leases()
    return other
