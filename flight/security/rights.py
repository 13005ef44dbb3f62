"""What each request needs: a right, and the tables on which. It knows messages, not principals.

`REQUIRED` names every message and action that a client can send; a test compares it with the protocol, so that a new
one cannot be forgotten here and left open. What is not in it is refused.
"""

from __future__ import annotations

from typing import Any

from flight import messages as m
from flight.security.access import ALL_TABLES, Right

REQUIRED: dict[str, Right] = {
    # DoPut, DoGet and DoExchange, by the class of the message; of storage servers, too.
    "PutCommand": "produce",
    "RegisterCommand": "store",
    "TakeTicket": "consume",
    "FetchTicket": "consume",
    "ReadTicket": "read",
    "WatchTicket": "read",
    "SqlTicket": "call",
    "ValuesTicket": "values",
    "SnapshotTicket": "admin",
    "Subscribe": "consume",
    "PutStream": "produce",
    "TakeStream": "consume",
    # Flight's own questions.
    "list_actions": "call",
    "list_flights": "call",
    "get_flight_info": "look",
    "get_schema": "look",
    # DoAction, by name.
    "ping": "call",
    "list_tables": "call",
    "shared_memory": "call",
    "placement": "call",
    "describe": "look",
    "stats": "read",
    "journal": "read",
    "missing": "produce",
    "put_shared": "produce",
    "seal": "produce",
    "plan": "consume",
    "ack": "consume",
    "nack": "consume",
    "renew": "consume",
    "void": "call",
    "announce": "consume",
    "create_table": "admin",
    "alter_table": "admin",
    "truncate_table": "admin",
    "drop_table": "admin",
    "requeue": "admin",
    "set_max_staleness": "admin",
    "checkpoints": "keep",
    "checkpoint_prepare": "keep",
    "checkpoint_commit": "keep",
    "checkpoint_release": "keep",
    "checkpoint_rewind": "admin",
    "storage_join": "store",
    "storage_beat": "store",
    "storage_leave": "store",
}
"""Right by message class or action. `list_tables`, `list_flights`, `ping` and `sql` show only what their caller may
see, `shared_memory` offers none to a principal that may not map the server's memory, `void` gives back what the
principal's own members hold; for an admin of all tables, whoever holds it.
"""

NARROWED = frozenset({"stats", "WatchTicket"})
"""Requests that, naming no table, are about those on which their caller has the right, be they none."""


def tables_of(name: str, request: m.Request) -> list[str]:
    """Return the tables on which the right is needed; a request that names none may be about all of them."""
    one, several = getattr(request, "table", None), getattr(request, "tables", None)
    if one is not None or several is not None:
        return [one] if one is not None else list(several or ())
    return [] if name in NARROWED or REQUIRED.get(name) == "call" else [ALL_TABLES]


def tables_referred_to(request: Any) -> list[str]:
    """Return the other tables that a new or changed table would tell something about.

    Raises:
        InvalidRequestError: its columns are no schema.
    """
    if not isinstance(request, m.CreateTable | m.AlterTable):
        return []
    columns = m.columns_from(f"table {request.table}", request.arrow_schema)
    found = [column.references for column in columns if column.references]
    if isinstance(request, m.CreateTable) and request.tickets is not None:
        found.append(request.tickets.table)
    return found
