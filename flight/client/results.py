"""What puts and takes return, by call or over an open stream."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from flight.schema import StalenessPolicy
from flight.state.ledger import TakeStatus


@dataclass(frozen=True, slots=True)
class PutResult:
    """What a put did. `row_ids` has one number a row, in order, the old one for a duplicate."""

    num_rows: int
    num_duplicates: int
    row_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """What a take returned.

    table: row_id, uid, group_id, attempt and the columns asked for; without rows unless status is "rows".
    status: "rows"; "empty", the deadline passed; "sealed", no row will ever come; "outdated", a newer policy version
        than the asker's is out: adopt it before asking again.
    policy_version: the announced version that matters to the table.
    max_staleness, staleness_policy: by which bound the columns `staleness` and `stale_tokens` were computed; None
        unless the consumer is the one that trains.
    """

    lease_id: str
    table: pa.Table
    status: TakeStatus
    policy_version: int
    max_staleness: int | None = None
    staleness_policy: StalenessPolicy | None = None
