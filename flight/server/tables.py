"""The actions that make, change, empty and describe tables, and those of dead letters: messages in, calls out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow as pa

from flight import messages as m
from flight.broker import Broker
from flight.errors import InvalidRequestError, LeaseLostError, TableNotFoundError
from flight.schema import TableSpec


def table_actions(broker: Broker) -> dict[str, Callable[[Any], Any]]:
    """Return what each action does, by name."""
    return {
        "void": lambda r: _void(broker, r.member),
        "alter_table": lambda r: m.from_spec(_alter(broker, r)),
        "missing": lambda r: broker.missing(r.table, r.uids),
        "truncate_table": lambda r: broker.truncate_table(r.table),
        "requeue": lambda r: broker.requeue(r.table, r.consumer, r.uids),
        "seal": lambda r: broker.seal(r.table, r.expected_rows),
        "announce": lambda r: broker.announce(r.table, r.policy_version),
        "set_max_staleness": lambda r: broker.set_max_staleness(r.table, r.max_staleness),
        "stats": lambda r: broker.stats(r.table),
    }


def _alter(broker: Broker, request: m.AlterTable) -> TableSpec:
    columns = m.columns_from(f"alter_table {request.table}", request.arrow_schema)
    return broker.alter_table(request.table, columns, request.consumers)


def _void(broker: Broker, member: str) -> int:
    """Give back all rows that a member holds, which is known to be gone; return how many. Idempotent."""
    num_rows = 0
    for table, consumer, lease_id in broker.held_by(member):
        with suppress(LeaseLostError, TableNotFoundError):  # it ended, or was finished, meanwhile
            num_rows += broker.nack(table, consumer, lease_id, None, reason=f"{member} is gone", requeue=True)
            broker.forget_lease(table, consumer, lease_id)
    return num_rows


def read_dead(broker: Broker, request: m.ReadTicket) -> pa.Table:
    """Answer a `read` of dead letters."""
    if request.row_ids is not None or request.filter is not None or request.newest:
        raise InvalidRequestError(
            f"read {request.table}: dead letters must be read by consumer, uids and max_rows, got another choice; "
            "filter what comes"
        )
    return broker.read_dead(
        request.table,
        consumer=request.consumer,
        columns=request.columns,
        uids=request.uids,
        max_rows=request.max_rows,
    )
