"""What the frames of a journal say: decisions in a log, tables and places of values in a checkpoint. No behaviour.

A decision says what was done, not what was asked for: a take names the rows that it leased, so that a later release
with another sampler reads the same history. Fields may be added with a default; no name or meaning changes.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from flight import messages as m
from flight.journal.format import FORMAT
from flight.schema import ConsumerSpec
from flight.state.snapshots import GateSnapshot, LeaseSnapshot, TableSnapshot


class FileHead(msgspec.Struct, kw_only=True):
    """The head of a file's first frame. `seq` is the last decision before the file (log) or in it (state)."""

    role: Literal["log", "rows", "state", "snapshot", "pin"]
    journal: str
    number: int
    seq: int
    format: int = FORMAT
    clock_offset_s: float = 0.0
    """Of a state: wall time minus the clock of the times in it, seconds."""
    checkpoint_id: str = ""
    """Of a pin: the name that its owner gave it."""


class Decision(msgspec.Struct, kw_only=True, tag_field="d", omit_defaults=True):
    """A change of the tables."""


class Opened(Decision, tag="opened"):
    """A server began to write: leases of its predecessor are void from here on."""

    clock_offset_s: float
    """Wall time minus the clock of the decisions that follow, seconds."""
    now: float = 0.0


class TableCreated(Decision, tag="create"):
    definition: m.CreateTable


class TableAltered(Decision, tag="alter"):
    table: str
    arrow_schema: bytes
    consumers: tuple[ConsumerSpec, ...]


class TableTruncated(Decision, tag="truncate"):
    table: str


class TableDropped(Decision, tag="drop"):
    table: str


class Put(Decision, tag="put"):
    """Rows of one batch; the body of the frame is the Arrow record batch message. Packed integers are int64.

    row_ids: packed, by row; -1 for a row that has left the table since.
    new_parts: packed, by row: the bit set of parts that this put added; empty if all rows have `parts`.
    """

    table: str
    writers: tuple[str, ...]
    schema: int
    row_ids: bytes
    parts: int
    new_parts: bytes = b""
    now: float = 0.0


class Taken(Decision, tag="take"):
    table: str
    consumer: str
    lease: LeaseSnapshot
    adopted_version: int | None = None


class DroppedTooOld(Decision, tag="drop_too_old"):
    """A take that leased nothing dropped what was too old for its version."""

    table: str
    exit_version: int


class Planned(Decision, tag="plan"):
    table: str
    order: dict[str, Any]
    lease_id: str
    sizes: list[int]


class Acked(Decision, tag="ack"):
    table: str
    consumer: str
    lease_id: str | None = None
    uids: list[str] | None = None
    step: int | None = None


class Nacked(Decision, tag="nack"):
    table: str
    consumer: str
    reason: str
    requeue: bool
    lease_id: str | None = None
    uids: list[str] | None = None
    policy_version: int | None = None


class Renewed(Decision, tag="renew"):
    table: str
    consumer: str
    lease_id: str
    deadline: float


class Sealed(Decision, tag="seal"):
    table: str
    expected_rows: int | None = None


class Announced(Decision, tag="announce"):
    table: str
    policy_version: int


class BoundChanged(Decision, tag="bound"):
    table: str
    max_staleness: int


class Requeued(Decision, tag="requeue"):
    table: str
    consumer: str
    uids: list[str] | None = None


class Expired(Decision, tag="expire"):
    """Leases or rows ended because their time was over."""

    now: float


class DeadDiscarded(Decision, tag="discard_dead"):
    table: str


class Rewound(Decision, tag="rewind"):
    """All tables became what they were at a kept checkpoint; `pin` is the number of its file."""

    pin: int
    now: float


AnyDecision = (
    Opened
    | TableCreated
    | TableAltered
    | TableTruncated
    | TableDropped
    | Put
    | Taken
    | DroppedTooOld
    | Planned
    | Acked
    | Nacked
    | Renewed
    | Sealed
    | Announced
    | BoundChanged
    | Requeued
    | Expired
    | DeadDiscarded
    | Rewound
)


class TableRecord(msgspec.Struct, kw_only=True):
    """A table of a checkpoint.

    created: number of the decision that created it; tells tables apart that had the same name one after the other.
    definitions: what it was at first and after each change, the last one is what it is.
    """

    created: int
    definitions: list[m.CreateTable]
    state: TableSnapshot
    gate: GateSnapshot | None = None


class ExtentRecord(msgspec.Struct, kw_only=True):
    """Where rows lie: a frame of a log, of moved rows or of the same file (file 0)."""

    table: str
    created: int
    file: int
    role: Literal["log", "rows", "snapshot"]
    offset: int
    num_bytes: int
    seq: int
    put: Put


class EndRecord(msgspec.Struct, kw_only=True):
    """How many tables and extents a checkpoint has."""

    num_tables: int
    num_extents: int


_ENCODER = msgspec.msgpack.Encoder()
_DECISIONS: msgspec.msgpack.Decoder[AnyDecision] = msgspec.msgpack.Decoder(AnyDecision)


def encode(record: Any) -> bytes:
    """Return the msgpack bytes of a record."""
    return _ENCODER.encode(record)


def decode_decision(data: memoryview) -> AnyDecision:
    """Read a decision.

    Raises:
        msgspec.MsgspecError: a newer release wrote it, or it is not one.
    """
    return _DECISIONS.decode(data)


def decode(data: memoryview, kind: Any) -> Any:
    """Read another record.

    Raises:
        msgspec.MsgspecError: it is not one.
    """
    return msgspec.msgpack.decode(data, type=kind)
