"""The protocol: every message that crosses the wire besides Arrow data, as JSON. It knows no sockets.

A message is a struct below; `encode` and `decode` are the only ways in and out. Every request carries the protocol
version `v`. Unknown fields are refused, so that a misspelt option is not silently ignored. See docs/protocol.md.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, Literal

import msgspec
import pyarrow as pa

from flight.errors import BY_CODE, FlightQueueError, InvalidRequestError
from flight.schema import KEY_COLUMNS, Column, ConsumerSpec, Fsync, StalenessSpec, TableSpec, TicketSpec

PROTOCOL_VERSION = 1
MAX_REQUEST_BYTES = 16 << 20
MAX_ERROR_CHARS = 1500
"""Errors travel in gRPC trailers, which are limited to 8 KB and hold the message twice."""


class Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What every request carries. `identity` names the caller in statistics and error messages."""

    v: int = 1
    """Protocol version that the sender speaks; `encode` says it always, a message without it is of version 1."""
    identity: str = ""


class SharedRef(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The wish for an answer in shared memory: the caller's `connection`, and a new number for what it will hold."""

    connection: str
    grant: int


class Finished(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a take finishes first: the rows of a lease, or those of `uids` in it."""

    lease_id: str
    uids: list[str] | None = None
    step: int | None = None


class TakeTicket(Request, tag="take", tag_field="verb"):
    """DoGet: lease rows, after finishing those of `ack`; if that is refused, nothing is taken."""

    table: str
    consumer: str
    max_rows: int
    min_rows: int = 1
    columns: list[str] | None = None
    policy_version: int | None = None
    lease_s: float = 60.0
    deadline_s: float = 30.0
    ack: Finished | None = None
    shared: SharedRef | None = None
    endpoints: bool = False
    """Whether the caller fetches itself what lies with storage servers; the answer then says where that is."""


class RowRange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rows by number, both ends included; an absent end is open."""

    first: int | None = None
    last: int | None = None


class ReadTicket(Request, tag="read", tag_field="verb"):
    """DoGet: look at rows. `filter` is as in `flight.data.filters`."""

    table: str
    columns: list[str] | None = None
    uids: list[str] | None = None
    row_ids: RowRange | None = None
    filter: dict[str, Any] | None = None
    max_rows: int | None = None
    newest: bool = False
    state: Literal["dead"] | None = None
    """"dead" for dead letters only; then `consumer` may say whose."""
    consumer: str | None = None
    shared: SharedRef | None = None
    endpoints: bool = False


class FetchTicket(Request, tag="fetch", tag_field="verb"):
    """DoGet: a rank's part of a plan, or one micro-batch of it."""

    table: str
    plan_id: str
    rank: int
    columns: list[str] | None = None
    micro_batch: int | None = None
    shared: SharedRef | None = None
    endpoints: bool = False


class SqlTicket(Request, tag="sql", tag_field="verb"):
    """DoGet: the answer to a SELECT over the tables as they are now."""

    query: str
    max_rows: int = 100_000
    deadline_s: float = 30.0
    shared: SharedRef | None = None


class WatchTicket(Request, tag="watch", tag_field="verb"):
    """DoGet: statistics of `tables` (all if null) every `interval_s`, until the deadline."""

    tables: list[str] | None = None
    interval_s: float = 1.0
    deadline_s: float = 3600.0


class SnapshotTicket(Request, tag="snapshot", tag_field="verb"):
    """DoGet: all tables as the bytes of a snapshot file, in pieces: one column `bytes`."""


class PutCommand(Request, tag="put", tag_field="verb"):
    """Descriptor of a DoPut. `acks` says whether each batch is acknowledged or, at the end, all of them by one."""

    table: str
    writer: str = ""
    deadline_s: float = 30.0
    acks: Literal["each", "last"] = "each"


class PutAck(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Answer to each batch of a DoPut, or to all of them together.

    placement: the version of what the action `placement` answers.
    """

    num_rows: int
    num_duplicates: int
    row_ids: list[int]
    placement: int = 0


class PutShared(Request):
    """Put the batches that lie in slots of shared memory, in order; answered by one `PutAck` a slot."""

    table: str
    connection: str
    slots: list[int]
    writer: str = ""
    deadline_s: float = 30.0


class SharedMemoryOffer(msgspec.Struct, kw_only=True):
    """Where clients of the same boot of the same host may connect, by which ticket, and what the arena holds now."""

    boot_id: str
    socket_path: str
    ticket: str
    arena_bytes: int
    used_bytes: int = 0
    num_slots: int = 0
    num_clients: int = 0


class CreateTable(Request):
    """`arrow_schema` is an Arrow IPC schema (base64 in JSON) whose field metadata hold meaning, unit, shape, writer."""

    table: str
    arrow_schema: bytes
    consumers: tuple[ConsumerSpec, ...]
    group_size: int = 1
    staleness: StalenessSpec | None = None
    tickets: TicketSpec | None = None
    capacity_rows: int = 65_536
    capacity_bytes: int = 1 << 30
    max_attempts: int = 8
    max_dead_letters: int = 1000
    max_age_s: float | None = None
    spill: bool = False
    memory_bytes: int = 256 << 20
    fsync: Fsync = "interval"
    exist_ok: bool = True


class AlterTable(Request):
    """`arrow_schema` holds the columns to add as in `create_table`, all nullable; empty for none."""

    table: str
    arrow_schema: bytes = b""
    consumers: tuple[ConsumerSpec, ...] = ()


class Requeue(Request):
    """Dead letters of a consumer: all, or those of `uids`."""

    table: str
    consumer: str
    uids: list[str] | None = None


class TableRequest(Request):
    table: str


class MissingRequest(Request):
    """Which of `uids` are not in a table."""

    table: str
    uids: list[str]


class Ack(Request):
    """`lease_id` for consumers that take, `uids` for keyed ones; both narrow a lease to some rows."""

    table: str
    consumer: str
    lease_id: str | None = None
    uids: list[str] | None = None
    step: int | None = None


class Nack(Request):
    table: str
    consumer: str
    reason: str
    lease_id: str | None = None
    uids: list[str] | None = None
    requeue: bool = True
    policy_version: int | None = None


class Renew(Request):
    table: str
    consumer: str
    lease_id: str
    lease_s: float


class VoidRequest(Request):
    """`member` is the identity of the client that took the rows."""

    member: str


class Seal(Request):
    table: str
    expected_rows: int | None = None


class Announce(Request):
    table: str
    policy_version: int


class SetMaxStaleness(Request):
    table: str
    max_staleness: int


class PlanRequest(Request):
    """What all ranks of a step ask for; `min_rows` defaults to `max_rows`. See `flight.state.plan_book.PlanOrder`."""

    table: str
    consumer: str
    step: int
    num_ranks: int
    max_rows: int
    min_rows: int | None = None
    policy_version: int | None = None
    balance: list[str] = []
    max_tokens_per_micro_batch: int | None = None
    max_rows_per_micro_batch: int | None = None
    keep_groups: bool = False
    lease_s: float = 60.0
    deadline_s: float = 30.0


PlanStatus = Literal["rows", "empty", "sealed", "outdated", "finished"]


class PlanAnswer(msgspec.Struct, kw_only=True):
    """`row_ids` by rank and micro-batch, `sizes` by rank; both empty unless status is "rows"."""

    status: PlanStatus
    policy_version: int
    plan_id: str = ""
    num_rows: int = 0
    num_micro_batches: int = 0
    row_ids: list[list[list[int]]] = []
    sizes: list[int] = []


class CheckpointRequest(Request):
    """`checkpoint_id` is the caller's name for a checkpoint, any text."""

    checkpoint_id: str


class StatsRequest(Request):
    table: str | None = None


class ErrorDetail(msgspec.Struct):
    """`extra_info` of every error."""

    code: str
    message: str


ACTIONS: dict[str, tuple[type[Request], str]] = {
    "ping": (Request, "answer while the server takes calls"),
    "create_table": (CreateTable, "add a table"),
    "alter_table": (AlterTable, "add nullable columns and consumers to a table in use"),
    "missing": (MissingRequest, "return those of some uids that are not in a table"),
    "truncate_table": (TableRequest, "remove all rows of a table"),
    "drop_table": (TableRequest, "remove a table and its rows"),
    "describe": (TableRequest, "return a table's specification"),
    "list_tables": (Request, "return the names of the tables"),
    "shared_memory": (Request, "say where clients of this host find shared memory, or null"),
    "put_shared": (PutShared, "put batches that lie in shared memory"),
    "stats": (StatsRequest, "return statistics of one table or all"),
    "journal": (Request, "return statistics of the journal, or null"),
    "checkpoint_prepare": (CheckpointRequest, "keep all tables as they are now, until released"),
    "checkpoint_commit": (CheckpointRequest, "note that what belongs to a kept checkpoint is durable"),
    "checkpoint_release": (CheckpointRequest, "let a kept checkpoint go"),
    "checkpoint_rewind": (CheckpointRequest, "let all tables be what they were at a kept checkpoint"),
    "checkpoints": (Request, "return the kept checkpoints, oldest first"),
    "ack": (Ack, "finish rows for a consumer"),
    "plan": (PlanRequest, "plan the training batch of a step, or return its plan"),
    "nack": (Nack, "give leased rows back, or skip them"),
    "requeue": (Requeue, "make dead letters ready again"),
    "renew": (Renew, "let a lease last longer"),
    "void": (VoidRequest, "give back all rows that a member holds"),
    "seal": (Seal, "declare that no more rows will come"),
    "announce": (Announce, "set the policy version of a table"),
    "set_max_staleness": (SetMaxStaleness, "change the staleness bound of a table"),
}
"""Actions by name: the type of the body and what they do."""

GetTicket = TakeTicket | ReadTicket | FetchTicket | SqlTicket | WatchTicket | SnapshotTicket


def encode(message: Any) -> bytes:
    """Return the JSON bytes of a message; a request says which protocol version it speaks."""
    if isinstance(message, Request):
        return msgspec.json.encode(msgspec.to_builtins(message) | {"v": PROTOCOL_VERSION})
    return msgspec.json.encode(message)


def decode(data: bytes | memoryview, kind: Any, *, what: str) -> Any:
    """Read a message; `what` names it in errors.

    Raises:
        InvalidRequestError: it is too large, not JSON, of another shape, or of another protocol version.
    """
    if len(data) > MAX_REQUEST_BYTES:
        raise InvalidRequestError(f"{what}: must be at most {MAX_REQUEST_BYTES} bytes, got {len(data)}")
    try:
        message = _decoder(kind).decode(data)
    except (msgspec.MsgspecError, FlightQueueError, UnicodeDecodeError, RecursionError) as error:
        # Another version may have other fields: the reader must learn that first, not which field is unknown.
        _check_version(_version_of(data), what)
        raise InvalidRequestError(
            f"{what}: must be a JSON message as in docs/protocol.md, got: {error}"
        ) from error
    _check_version(getattr(message, "v", PROTOCOL_VERSION), what)
    return message


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return the reader of a kind of message: making one costs ten times what reading does."""
    return msgspec.json.Decoder(kind)


class _Versioned(msgspec.Struct):
    v: int = 1


def _version_of(data: bytes | memoryview) -> int:
    try:
        return msgspec.json.decode(data, type=_Versioned).v
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return PROTOCOL_VERSION


def _check_version(version: int, what: str) -> None:
    if version != PROTOCOL_VERSION:
        raise InvalidRequestError(
            f"{what}: protocol version v must be {PROTOCOL_VERSION}, got {version}; "
            "use a client of the server's release"
        )


def from_spec(spec: TableSpec, *, exist_ok: bool = True, identity: str = "") -> CreateTable:
    """Return the message that creates (or describes) a table."""
    values = {part.name: getattr(spec, part.name) for part in fields(spec) if part.name in _SHARED}
    schema = pa.schema([column.to_field() for column in spec.columns])
    return CreateTable(
        table=spec.name,
        arrow_schema=schema.serialize().to_pybytes(),
        exist_ok=exist_ok,
        identity=identity,
        **values,
    )


def to_spec(message: CreateTable) -> TableSpec:
    """Read a table's specification; fields without notes are nullable columns that anyone may write.

    Raises:
        InvalidRequestError: the specification could never work; the message says which part.
    """
    columns = columns_from(f"create_table {message.table}", message.arrow_schema)
    return TableSpec(
        name=message.table, columns=columns, **{name: getattr(message, name) for name in _SHARED}
    )


def columns_from(where: str, arrow_schema: bytes) -> tuple[Column, ...]:
    """Read the columns of an Arrow IPC schema, key columns left out; no bytes are no columns.

    Raises:
        InvalidRequestError: the bytes are not a schema.
    """
    if not arrow_schema:
        return ()
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(arrow_schema))
        return tuple(Column.from_field(each) for each in schema if each.name not in KEY_COLUMNS)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"{where}: arrow_schema must be an Arrow IPC schema, got: {error}"
        ) from error


_SHARED = frozenset(
    part.name for part in fields(TableSpec) if part.init and part.name not in ("name", "columns")
)


def error_detail(error: FlightQueueError) -> tuple[str, bytes]:
    """Return the text and the `extra_info` of an error, short enough for gRPC trailers."""
    message = str(error).encode("ascii", "backslashreplace").decode()
    if len(message) > MAX_ERROR_CHARS:
        message = message[: MAX_ERROR_CHARS - 4] + " ..."
    return message, encode(ErrorDetail(error.code, message))


def to_error(extra_info: bytes | None) -> FlightQueueError | None:
    """Return the error that a server described, None if it is not one of ours."""
    try:
        detail = msgspec.json.decode(extra_info or b"", type=ErrorDetail)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return BY_CODE.get(detail.code, FlightQueueError)(detail.message)
