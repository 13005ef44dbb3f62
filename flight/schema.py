"""What a table is: columns with meaning, consumers, group size, staleness bound and capacity. Pure data.

It is not the table: rows, leases and cursors live in `flight.table`. A specification is checked when it is
made, so that a table which could never deliver a row is refused before the first row exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import pyarrow as pa

from flight.errors import InvalidRequestError

Sampler = Literal["fifo", "groups", "keyed"]
"""How rows reach a consumer: oldest first, whole groups oldest first, or by uid on request (`read` + `ack`)."""

StalenessPolicy = Literal["pace", "drop", "mask", "reweight"]
"""What happens at the exit to a row that is too old.

pace: the trainer waits so that no row grows too old; one that did is dropped.
drop: it is dropped and counted, nobody waits.
mask, reweight: it is delivered and counted, its stale tokens are marked: to be left out by the trainer, or reweighted.
"""

Fsync = Literal["none", "interval", "batch"]
"""What an acknowledged change of a table survives, on a server with a journal.

none: the end of the server process, `kill -9` included.
interval: that, and from the journal's interval on (a second unless told otherwise) the end of the machine.
batch: the end of the machine; changes that come together share one fsync.
"""

MARK_COLUMNS = ("staleness", "stale_tokens")
"""What the staleness consumer's takes say about the age of rows and tokens, computed when they are taken."""

KEY_COLUMNS = ("row_id", "uid", "group_id")
RESERVED_COLUMNS = (*KEY_COLUMNS, "attempt")


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table.

    `meaning` is one plain sentence; `unit` and `shape` are empty for opaque scalars; `writer` names the role
    that writes it. A nullable column may stay empty (a modality that a row lacks); a column of another writer
    than the row's first one arrives later and is null until then. `references` is the table whose uids it holds, one
    a row (string) or several (list of string); empty for other columns. See `flight.state.references`.
    """

    name: str
    type: pa.DataType
    meaning: str
    unit: str = ""
    shape: str = ""
    writer: str = ""
    nullable: bool = False
    references: str = ""

    def to_field(self) -> pa.Field:
        """Return the Arrow field; meaning, unit, shape and writer are its metadata."""
        notes = {"meaning": self.meaning, "unit": self.unit, "shape": self.shape, "writer": self.writer}
        notes |= {"references": self.references} if self.references else {}
        return pa.field(
            self.name, self.type, nullable=True, metadata=notes | {"nullable": str(self.nullable).lower()}
        )

    @classmethod
    def from_field(cls, arrow_field: pa.Field) -> Column:
        """Read back what `to_field` wrote; absent notes are empty."""
        notes = {key.decode(): value.decode() for key, value in (arrow_field.metadata or {}).items()}
        return cls(
            name=arrow_field.name,
            type=arrow_field.type,
            meaning=notes.get("meaning", ""),
            unit=notes.get("unit", ""),
            shape=notes.get("shape", ""),
            writer=notes.get("writer", ""),
            nullable=notes.get("nullable", "true") == "true",
            references=notes.get("references", ""),
        )


@dataclass(frozen=True, kw_only=True)
class MixSpec:
    """Sources that share a consumer's deliveries by weight, as far as each has something ready.

    column: a string column that names the source; of a group, the first row's counts.
    weights: positive shares by source, in any unit.
    other_weight: the share of all rows together whose source is not named.
    """

    column: str
    weights: dict[str, float]
    other_weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ConsumerSpec:
    """A named reader of a table with a cursor of its own; a row is ready once all `columns` are there.

    skip_equal: a number column; a whole group with the same value in all rows teaches nothing, so it leaves the table.
        Empty: no group is skipped.
    """

    name: str
    columns: tuple[str, ...]
    sampler: Sampler = "fifo"
    mix: MixSpec | None = None
    skip_equal: str = ""

    def label_columns(self) -> set[str]:
        """Return the columns whose values the sampler looks at."""
        return {self.mix.column if self.mix else "", self.skip_equal} - {""}


@dataclass(frozen=True, kw_only=True)
class StalenessSpec:
    """The freshness bound of a table.

    max_staleness: policy versions between the weights that generated a row and the weights that train on it.
    rows_per_version: rows that one policy version consumes (the training batch).
    consumer: whose takes count as training; the bound is checked at that exit.
    """

    max_staleness: int
    rows_per_version: int
    consumer: str
    policy: StalenessPolicy = "pace"


@dataclass(frozen=True, kw_only=True)
class TicketSpec:
    """Taking one row of this table is the permit to produce `rows_per_ticket` rows of table `table`."""

    table: str
    rows_per_ticket: int
    consumer: str = ""
    """Whose takes are permits; empty for the table's first consumer."""


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """All that defines a table. Key columns (`row_id`, `uid`, `group_id`) are added by the server."""

    name: str
    columns: tuple[Column, ...]
    consumers: tuple[ConsumerSpec, ...]
    group_size: int = 1
    staleness: StalenessSpec | None = None
    tickets: TicketSpec | None = None
    capacity_rows: int = 65_536
    capacity_bytes: int = 1 << 30
    max_attempts: int = 8
    """Deliveries after which a row is a dead letter."""
    max_dead_letters: int = 1000
    """Rows that are kept as dead letters, to be read and requeued."""
    max_age_s: float | None = None
    """Seconds after which a row that is not finished leaves the table; None keeps it. In a table that others refer to,
    only rows that nothing has referred to yet grow old."""
    spill: bool = False
    """Whether the oldest values go to disk when `memory_bytes` are used; `capacity_bytes` bounds both together."""
    memory_bytes: int = 256 << 20
    """Bytes that a table with `spill` holds in memory."""
    fsync: Fsync = "interval"
    """When a change is on the disk, on a server with a journal; see `Fsync`."""
    columns_by_name: dict[str, Column] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        raise_unless = _require(f"table {self.name!r}")
        raise_unless(self.name.isidentifier(), "name", "a plain identifier", self.name)
        raise_unless(self.group_size >= 1, "group_size", "at least 1", self.group_size)
        raise_unless(
            self.capacity_rows >= self.group_size, "capacity_rows", "at least group_size", self.capacity_rows
        )
        raise_unless(self.capacity_bytes > 0, "capacity_bytes", "positive", self.capacity_bytes)
        raise_unless(self.max_attempts >= 1, "max_attempts", "at least 1", self.max_attempts)
        raise_unless(self.max_dead_letters >= 0, "max_dead_letters", "0 or more rows", self.max_dead_letters)
        raise_unless(
            self.max_age_s is None or self.max_age_s > 0, "max_age_s", "positive seconds", self.max_age_s
        )
        raise_unless(self.memory_bytes > 0, "memory_bytes", "positive", self.memory_bytes)
        raise_unless(self.fsync in get_args(Fsync), "fsync", f"one of {get_args(Fsync)}", self.fsync)
        names = [column.name for column in self.columns]
        raise_unless(len(set(names)) == len(names), "columns", "named once each", names)
        raise_unless(not set(names) & set(RESERVED_COLUMNS), "columns", f"none of {RESERVED_COLUMNS}", names)
        for column in self.columns:
            raise_unless(
                not _has_dictionary(column.type),
                f"column {column.name!r}",
                "of a plain (not dictionary) type",
                column.type,
            )
            raise_unless(
                not column.references
                or (column.references != self.name and column.type in (pa.string(), pa.list_(pa.string()))),
                f"references of column {column.name!r}",
                "another table's name, on a column of string or list<string>",
                (column.references, str(column.type)),
            )
        object.__setattr__(self, "columns_by_name", {column.name: column for column in self.columns})
        for consumer in self.consumers:
            missing = sorted(set(consumer.columns) - set(names) - set(KEY_COLUMNS))
            raise_unless(not missing, f"consumer {consumer.name!r}", f"made of columns {names}", missing)
            raise_unless(
                consumer.sampler in get_args(Sampler),
                "sampler",
                f"one of {get_args(Sampler)}",
                consumer.sampler,
            )
        consumer_names = [consumer.name for consumer in self.consumers]
        raise_unless(
            len(set(consumer_names)) == len(consumer_names), "consumers", "named once each", consumer_names
        )
        self._check_staleness(raise_unless)
        self._check_tickets(raise_unless)
        for consumer in self.consumers:
            _check_mix(self, consumer)
            _check_skip_equal(self, consumer)

    def _check_staleness(self, raise_unless: Check) -> None:
        bound = self.staleness
        if bound is None:
            return
        queues = self.queue_consumers()
        raise_unless(
            bound.policy in get_args(StalenessPolicy),
            "policy",
            f"one of {get_args(StalenessPolicy)}",
            bound.policy,
        )
        raise_unless(
            bound.max_staleness >= 0, "max_staleness", "0 or more policy versions", bound.max_staleness
        )
        raise_unless(
            bound.rows_per_version >= 1 and bound.rows_per_version % self.group_size == 0,
            "rows_per_version",
            f"a multiple of group_size {self.group_size}",
            bound.rows_per_version,
        )
        raise_unless(
            bound.consumer in queues,
            "staleness.consumer",
            f"one of the taking consumers {queues}",
            bound.consumer,
        )
        column = self.columns_by_name.get("policy_version_start")
        raise_unless(
            column is not None and column.type == pa.int64(),
            "columns",
            "with policy_version_start of type int64",
            column,
        )
        if bound.policy in ("mask", "reweight"):
            versions = self.columns_by_name.get("token_policy_versions")
            fits = versions is None or (
                pa.types.is_list(versions.type)
                and pa.types.is_integer(versions.type.value_type)
                and column is not None
                and versions.writer == column.writer
            )
            raise_unless(
                fits,
                "token_policy_versions",
                "a list of integers by the writer of policy_version_start",
                versions,
            )
            raise_unless(
                "stale_tokens" not in self.columns_by_name,
                "columns",
                f"without stale_tokens, which takes add under the policy {bound.policy!r}",
                list(self.columns_by_name),
            )
        self.check_max_staleness(bound.max_staleness)

    def check_max_staleness(self, max_staleness: int) -> None:
        """Raise unless the table can hold all rows that a bound of `max_staleness` lets in.

        With less room, a row that must be trained now could wait for room that only its training would make.

        Raises:
            InvalidRequestError: the table has no staleness bound, `max_staleness` is negative or too large.
        """
        raise_unless = _require(f"table {self.name!r}")
        raise_unless(self.staleness is not None, "staleness", "set when the table is created", None)
        raise_unless(max_staleness >= 0, "max_staleness", "0 or more policy versions", max_staleness)
        most = self.capacity_rows // (self.staleness.rows_per_version if self.staleness else 1) - 1
        raise_unless(
            max_staleness <= most,
            "max_staleness",
            f"at most {most}, so that capacity_rows {self.capacity_rows} holds (max_staleness + 1) * rows_per_version",
            max_staleness,
        )

    def _check_tickets(self, raise_unless: Check) -> None:
        if self.tickets is None:
            return
        queues = self.queue_consumers()
        raise_unless(
            self.tickets.rows_per_ticket >= 1, "rows_per_ticket", "at least 1", self.tickets.rows_per_ticket
        )
        raise_unless(
            self.ticket_consumer() in queues, "tickets.consumer", f"one of {queues}", self.tickets.consumer
        )

    def checked_columns(self, columns: Sequence[str] | None) -> list[str]:
        """Return the data columns among `columns` (key columns are always there); None means all.

        Raises:
            InvalidRequestError: a name is unknown.
        """
        if columns is None:
            return list(self.columns_by_name)
        unknown = [
            name for name in columns if name not in self.columns_by_name and name not in RESERVED_COLUMNS
        ]
        _require(f"table {self.name!r}")(
            not unknown, "columns", f"among {list(self.columns_by_name)}", unknown
        )
        return [name for name in dict.fromkeys(columns) if name not in RESERVED_COLUMNS]

    def columns_for(self, consumer: str, columns: Sequence[str] | None) -> list[str]:
        """Return the data columns among `columns`; None means those that the consumer needs, all if none."""
        if columns is None:
            columns = next((each.columns for each in self.consumers if each.name == consumer), ()) or None
        return self.checked_columns(columns)

    def queue_consumers(self) -> list[str]:
        """Return the consumers that take rows from a queue (all but the keyed ones)."""
        return [consumer.name for consumer in self.consumers if consumer.sampler != "keyed"]

    def label_columns(self) -> list[str]:
        """Return the columns whose values samplers look at."""
        return self._label_columns

    @cached_property
    def _label_columns(self) -> list[str]:
        return sorted(set[str]().union(*(consumer.label_columns() for consumer in self.consumers)))

    def references(self) -> list[str]:
        """Return the tables that columns refer to."""
        return self._references

    @cached_property
    def _references(self) -> list[str]:
        return list(dict.fromkeys(column.references for column in self.columns if column.references))

    def ticket_consumer(self) -> str:
        """Return whose takes are permits, or an empty string."""
        if self.tickets is None:
            return ""
        return self.tickets.consumer or (self.consumers[0].name if self.consumers else "")

    def arrow_schema(self) -> pa.Schema:
        """Return key columns followed by the table's columns, with their notes as field metadata."""
        return self._arrow_schema

    @cached_property
    def _arrow_schema(self) -> pa.Schema:
        keys = (
            Column(
                name="row_id",
                type=pa.int64(),
                meaning="number given by the server, never reused",
                writer="server",
            ),
            Column(
                name="uid", type=pa.string(), meaning="name given by the producer; a repeated put is ignored"
            ),
            Column(name="group_id", type=pa.string(), meaning="rows that belong together share it"),
        )
        return pa.schema([column.to_field() for column in (*keys, *self.columns)])


Check = Callable[[bool, str, str, object], None]
"""Raises InvalidRequestError unless its first argument holds: (condition, what, rule, got)."""


def _require(where: str) -> Check:
    def check(condition: bool, what: str, rule: str, value: object) -> None:
        if not condition:
            raise InvalidRequestError(f"{where}: {what} must be {rule}, got {value!r}")

    return check


def _check_mix(spec: TableSpec, consumer: ConsumerSpec) -> None:
    if consumer.mix is None:
        return
    check = _require(f"table {spec.name!r}, mix of consumer {consumer.name!r}")
    check(consumer.sampler != "keyed", "sampler", "fifo or groups", consumer.sampler)
    check(
        spec.staleness is None or spec.staleness.consumer != consumer.name,
        "consumer",
        "another one than the staleness consumer, which takes the oldest version first; mix where prompts are taken",
        consumer.name,
    )
    column = spec.columns_by_name.get(consumer.mix.column)
    check(
        column is not None and column.type == pa.string() and column.name in consumer.columns,
        "column",
        f"a string column among {list(consumer.columns)}",
        consumer.mix.column,
    )
    shares = [*consumer.mix.weights.values(), consumer.mix.other_weight]
    check(
        bool(consumer.mix.weights) and all(0 < share < float("inf") for share in shares),
        "weights",
        "given and positive",
        [consumer.mix.weights, consumer.mix.other_weight],
    )


def _check_skip_equal(spec: TableSpec, consumer: ConsumerSpec) -> None:
    if not consumer.skip_equal:
        return
    check = _require(f"table {spec.name!r}, skip_equal of consumer {consumer.name!r}")
    check(
        consumer.sampler == "groups" and spec.group_size > 1,
        "sampler",
        "groups of two rows or more",
        consumer.sampler,
    )
    column = spec.columns_by_name.get(consumer.skip_equal)
    check(
        column is not None and _is_number(column.type) and column.name in consumer.columns,
        "column",
        f"a number column among {list(consumer.columns)}",
        consumer.skip_equal,
    )
    check(
        spec.staleness is None or spec.staleness.consumer == consumer.name,
        "consumer",
        "the staleness consumer, so that what is skipped makes room for others",
        consumer.name,
    )


def _is_number(arrow_type: pa.DataType) -> bool:
    return (
        pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type) or pa.types.is_boolean(arrow_type)
    )


def _has_dictionary(arrow_type: pa.DataType) -> bool:
    children = [arrow_type.field(index).type for index in range(arrow_type.num_fields)]
    return pa.types.is_dictionary(arrow_type) or any(_has_dictionary(child) for child in children)
