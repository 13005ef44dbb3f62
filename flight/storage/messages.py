"""Messages between clients, a coordinator and its storage servers. See docs/protocol.md, Storage servers.

A run is `[first, count]`: consecutive numbers. Lists of runs stand for their numbers in order.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from flight.messages import PutAck, Request, SharedRef

Run = tuple[int, int]


class StorageJoin(Request):
    """A storage server is there; answered by the number that the coordinator gives it (`owner`).

    location: the URI at which clients and the coordinator reach it.
    """

    location: str
    capacity_bytes: int | None = None


class StorageBeat(Request):
    """A storage server is still there. Answered when there is something to free, after `deadline_s` at the latest.

    heard: the `seq` of the last answer that arrived here.
    unsettled: first numbers of batches whose registration was not answered.
    """

    owner: int
    used_bytes: int
    heard: int = 0
    unsettled: list[int] = msgspec.field(default_factory=list)
    is_leaving: bool = False
    deadline_s: float = 1.0


class BeatAnswer(msgspec.Struct, kw_only=True):
    """`free`: what nobody needs any more. `settled`: which of `unsettled` are registered; the others never will be.

    If `is_known` is false, the coordinator has given the owner up, or is another one: all its values are void.
    """

    is_known: bool
    seq: int = 0
    free: list[Run] = []
    settled: list[int] = []
    num_rows: int = 0


class StorageLeave(Request):
    """A storage server goes; what it still holds is lost."""

    owner: int


class OwnerInfo(msgspec.Struct, kw_only=True):
    """A storage server as the coordinator knows it."""

    owner: int
    location: str
    state: Literal["open", "leaving"]
    num_rows: int
    used_bytes: int
    capacity_bytes: int | None
    silent_s: float


class Placement(msgspec.Struct, kw_only=True):
    """Who takes rows; `version` grows when that changes. `num_lost` counts rows lost with storage servers so far."""

    version: int
    owners: list[OwnerInfo]
    num_lost: int = 0


class RegisterCommand(Request, tag="register", tag_field="verb"):
    """Descriptor of a DoPut by a storage server: rows whose values it has. The batches are stubs."""

    table: str
    owner: int
    writer: str = ""
    deadline_s: float = 30.0


class StubNote(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Metadata of each stub: the number of its first row at the owner, and the bytes of its values there."""

    first: int
    num_bytes: int


class Registered(msgspec.Struct, kw_only=True):
    """Answer to each stub. `unused`: indices of rows of which nothing was new; their values may go."""

    ack: PutAck
    unused: list[int] = []


class ValuesTicket(Request, tag="values", tag_field="verb"):
    """DoGet from a storage server: columns of `arrow_schema` of rows by their numbers there; what is gone is left out.

    row_ids: the numbers that the rows have in their table, for the column row_id, which always comes first.
    table: whose rows they are, others are left out; any if empty, which takes a right on all tables.
    """

    arrow_schema: bytes
    runs: list[Run]
    row_ids: list[Run]
    table: str = ""
    shared: SharedRef | None = None


class Endpoint(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where columns of some rows of an answer lie. Owner 0 is the coordinator itself.

    positions: the rows of the answer; runs: the same rows at the owner.
    """

    owner: int = 0
    location: str = ""
    columns: list[str]
    positions: list[Run]
    runs: list[Run] = []


class Elsewhere(msgspec.Struct, kw_only=True):
    """Metadata `owners` of an answer: columns that are not in the stream. `arrow_schema` has all of them in order."""

    table: str
    arrow_schema: bytes
    endpoints: list[Endpoint]


ACTIONS: dict[str, tuple[type[Request], str]] = {
    "placement": (Request, "say which storage servers take rows"),
    "storage_join": (StorageJoin, "join as a storage server"),
    "storage_beat": (StorageBeat, "say that a storage server is there, and hear what it may free"),
    "storage_leave": (StorageLeave, "leave as a storage server"),
}
"""Actions of a coordinator by name: the type of the body and what they do."""
