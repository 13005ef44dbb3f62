"""The durable state of a table as plain data: what a journal writes down and reads back. No behaviour.

Each class of `flight.state` that has state makes its part (`capture`) and takes it back (`restore`). What follows from
other parts is not here: queues follow from rows, open groups from their rows and how many came. Fields may be added
with a default; none changes its name or meaning, for snapshots must be readable for ever.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class RowsSnapshot(msgspec.Struct, kw_only=True):
    """Rows of a table, oldest first: one list a field, all of the same length."""

    row_ids: list[int]
    uids: list[str]
    group_ids: list[str]
    versions: list[int]
    parts: list[int]
    pending: list[int]
    given_up: list[bool]
    dead: list[int]
    put_at: list[float]
    num_made: list[int]
    labels: list[dict[str, Any]]


class LeaseSnapshot(msgspec.Struct, kw_only=True):
    """A live lease and the rows that it still holds."""

    lease_id: str
    member: str
    version: int
    deadline: float
    max_staleness: int | None
    num_closed: int
    row_ids: list[int]


class CursorSnapshot(msgspec.Struct, kw_only=True):
    """One consumer: what was tried how often (by the first row of each unit), who holds what, which leases are over."""

    counts: dict[str, int]
    tried_row_ids: list[int]
    tried_attempts: list[int]
    leases: list[LeaseSnapshot]
    closed: list[tuple[str, int]]


class LetterSnapshot(msgspec.Struct, kw_only=True):
    """A dead letter."""

    consumer: str
    row_ids: list[int]
    attempts: int
    reason: str


class PlanSnapshot(msgspec.Struct, kw_only=True):
    """A plan that is live or finished; how it is split is forgotten, for its lease ends with the server."""

    order: dict[str, Any]
    """The fields of a `PlanOrder`."""
    plan_id: str
    status: Literal["live", "finished"]
    num_micro_batches: int


class EndingSnapshot(msgspec.Struct, kw_only=True):
    """What is known about the end of a table."""

    is_declared: bool
    expected_rows: int | None
    num_never: int
    missing: list[tuple[str, int]]


class TableSnapshot(msgspec.Struct, kw_only=True):
    """All of a table but its definition and its values."""

    rows: RowsSnapshot
    counts: dict[str, int]
    num_truncated: int
    arrived: dict[str, int]
    """Rows that have come, by group."""
    retired_uids: list[str]
    retired_row_ids: list[int]
    ending: EndingSnapshot
    cursors: dict[str, CursorSnapshot]
    letters: list[LetterSnapshot]
    given_up: list[tuple[str, str, str]]
    plans: list[PlanSnapshot]
    last_step: dict[str, int]
    is_referred_to: bool = False
    """Whether rows of other tables may refer to rows of this one."""
    next_row_id: int | None = None
    """The number of the next new row; None if it is the number of rows put so far."""


class TicketSnapshot(msgspec.Struct, kw_only=True):
    """Rows that may still be put for a group."""

    group_id: str
    num_rows: int
    version: int


class GateSnapshot(msgspec.Struct, kw_only=True):
    """The books of a staleness bound."""

    max_staleness: int
    policy_version: int
    num_waiting: int
    trained: dict[int, int]
    trained_age: dict[int, int]
    dropped_age: dict[int, int]
    stale_age: dict[int, int]
    completion_tokens: dict[str, dict[int, int]]
    counts: dict[str, int]
    tickets: list[TicketSnapshot]
    begun: dict[str, int] = {}
    """Version from which unfinished work was begun, by group."""
