"""Checkpoints: all tables after one decision, and where the values of their rows lie. Written whole or not at all.

A file is HEADER, SCHEMA..., TABLE..., EXTENTS..., END; in a snapshot file ROWS come before the tables, and the extents
refer to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from flight import messages as m
from flight.errors import JournalDamagedError
from flight.journal import records as r
from flight.journal.extents import Extent, TableKey
from flight.journal.format import FORMAT, Damage, Frame, Kind, frame, read_frames
from flight.state.ledger import Ledger

EXTENTS_A_FRAME = 500


@dataclass(kw_only=True)
class Checkpoint:
    """What a state or snapshot file says. `damages` is empty in a file that is whole."""

    head: r.FileHead | None = None
    tables: list[r.TableRecord] = field(default_factory=list)
    schemas: dict[int, bytes] = field(default_factory=dict)
    extents: list[r.ExtentRecord] = field(default_factory=list)
    is_whole: bool = False
    damages: list[Damage] = field(default_factory=list)
    seq: int = 0
    """The last decision that is in it."""


def capture(ledger: Ledger, created: Mapping[str, int]) -> list[r.TableRecord]:
    """Return all tables as plain data that nothing changes any more. Needs the broker's lock; encoding does not."""
    return [
        r.TableRecord(
            created=created[name],
            definitions=[m.from_spec(spec) for spec in (*table.former_specs, table.spec)],
            state=table.capture(),
            gate=ledger.gates[name].capture() if name in ledger.gates else None,
        )
        for name, table in ledger.tables.items()
    ]


def state_frames(
    head: r.FileHead,
    tables: Sequence[r.TableRecord],
    extents: Mapping[TableKey, Sequence[Extent]],
    schemas: Mapping[int, bytes],
) -> Iterator[list[Any]]:
    """Yield the buffers of a state file, frame by frame."""
    seq = head.seq
    yield frame(Kind.HEADER, seq, seq, r.encode(head))
    used = {extent.put.schema for each in extents.values() for extent in each}
    for number in sorted(used):
        yield frame(Kind.SCHEMA, seq, seq, r.encode(number), schemas[number])
    yield from end_frames(seq, tables, extents)


def end_frames(
    seq: int, tables: Sequence[r.TableRecord], extents: Mapping[TableKey, Sequence[Extent]]
) -> Iterator[list[Any]]:
    """Yield what follows the header and the schemas (and, in a snapshot, the rows)."""
    for table in tables:
        yield frame(Kind.TABLE, seq, seq, b"", r.encode(table))
    records = [extent.record(key) for key, each in extents.items() for extent in each]
    for start in range(0, len(records), EXTENTS_A_FRAME):
        yield frame(Kind.EXTENTS, seq, seq, b"", r.encode(records[start : start + EXTENTS_A_FRAME]))
    end = r.EndRecord(num_tables=len(tables), num_extents=len(records))
    yield frame(Kind.END, seq, seq, r.encode(end))


def read_checkpoint(
    where: str, data: memoryview, on_rows: Callable[[Frame], None] | None = None
) -> Checkpoint:
    """Read a state or snapshot file as far as it can be read; `on_rows` is called with the frames of rows.

    Raises:
        JournalDamagedError: a newer release wrote it.
    """
    found = Checkpoint()
    for each in read_frames(data):
        if isinstance(each, Damage):
            found.damages.append(each)
            continue
        found.seq = each.seq
        try:
            _read(where, found, each)
        except msgspec.MsgspecError as error:
            found.damages.append(Damage(each.offset, f"it cannot be understood: {error}"))
        if each.kind is Kind.ROWS and on_rows is not None:
            on_rows(each)
    if not found.is_whole and not found.damages:
        found.damages.append(Damage(len(data), "the file ends before its last frame"))
    return found


def _read(where: str, found: Checkpoint, each: Frame) -> None:
    if each.kind is Kind.HEADER:
        found.head = read_head(where, each)
    elif each.kind is Kind.SCHEMA:
        found.schemas[r.decode(each.head, int)] = bytes(each.body)
    elif each.kind is Kind.TABLE:
        found.tables.append(r.decode(each.body, r.TableRecord))
    elif each.kind is Kind.EXTENTS:
        found.extents += r.decode(each.body, list[r.ExtentRecord])
    elif each.kind is Kind.END:
        end = r.decode(each.head, r.EndRecord)
        have = (len(found.tables), len(found.extents))
        found.is_whole = found.head is not None and have == (end.num_tables, end.num_extents)
        if not found.is_whole and not found.damages:
            found.damages.append(Damage(each.offset, f"tables and extents must be {end}, got {have}"))


class _Format(msgspec.Struct):
    format: int = FORMAT


def read_head(where: str, each: Frame) -> r.FileHead:
    """Read the head of a file's first frame.

    Raises:
        JournalDamagedError: a newer release wrote the file.
    """
    version = r.decode(each.head, _Format).format
    if version > FORMAT:
        raise JournalDamagedError(
            f"{where}: format must be at most {FORMAT}, got {version}; use the release that wrote it or a later one"
        )
    return r.decode(each.head, r.FileHead)
