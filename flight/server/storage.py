"""The coordinator's side of storage servers on the wire: rows registered, endpoints said, values relayed.

Who asks with `endpoints` fetches from storage servers itself. For all others, subscribers, SQL and clients that know
nothing of this, the coordinator fetches, so that they see whole rows and pay for it with its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.flight as paflight
import structlog

from flight import messages as m
from flight.broker import Broker, ReadRequest, Wait
from flight.broker.storage import Shard
from flight.client.credentials import Credentials
from flight.client.gathering import Part, gather_rows
from flight.client.owners import OwnerConnections
from flight.data.batches import check_buffers
from flight.errors import FlightQueueError, InvalidRequestError, UnavailableError
from flight.schema import TableSpec
from flight.storage.messages import (
    Endpoint,
    Placement,
    RegisterCommand,
    Registered,
    StorageJoin,
    StubNote,
    ValuesTicket,
)
from flight.storage.stubs import Stub

RELAY_DEADLINE_S = 10.0
"""Seconds in which a storage server must answer the coordinator."""

LOG = structlog.get_logger("flight.server.storage")


class Relay:
    """Fetches from storage servers for those that do not, and finds out who is gone. Thread-safe.

    It shows them what `credentials` returns.
    """

    def __init__(self, broker: Broker, credentials: Callable[[], Credentials | None] = lambda: None) -> None:
        self._broker = broker
        self._owners = OwnerConnections("coordinator", shared_memory=False, credentials=credentials)

    def close(self) -> None:
        """Close all connections."""
        self._owners.close()

    def check(self, location: str) -> None:
        """Raise unless a storage server answers at a location.

        Raises:
            InvalidRequestError: none does.
        """
        try:
            self._owners.ping(location, RELAY_DEADLINE_S)
        except FlightQueueError as error:
            raise InvalidRequestError(
                f"storage_join: location must be an address at which the coordinator reaches the storage server, "
                f"got {location!r}: {error}"
            ) from error

    def whole(self, name: str, table: pa.Table) -> pa.Table:
        """Return an answer with the columns that lie elsewhere; rows that were lost meanwhile are left out."""
        found, num_missing = gather_rows(table, lambda part: self._fetch(name, part))
        if not num_missing:
            return found
        is_there = self._broker.still_there(name, found.column("row_id").to_pylist())
        return found.filter(pa.array(is_there, pa.bool_()))

    def _fetch(self, name: str, part: Part) -> pa.Table | None:
        endpoint: Endpoint = part.endpoint
        if not endpoint.owner:
            return self._broker.read(name, ReadRequest(uids=part.uids(), columns=endpoint.columns))
        try:
            return self._owners.values(part, RELAY_DEADLINE_S, retry=True)
        except UnavailableError as error:
            LOG.warning("a storage server does not answer", location=endpoint.location, error=str(error))
            self._broker.lose_owner(endpoint.owner, "it does not answer")
            self._owners.forget(endpoint.location)
            return None


def storage_actions(broker: Broker, relay: Relay) -> dict[str, Callable[[Any], Any]]:
    """Return what each action of storage servers does, by name; beats, which wait, are not among them."""

    def join(request: StorageJoin) -> int:
        relay.check(request.location)
        return broker.join(request.location, request.capacity_bytes)

    def placement(_: m.Request) -> Placement:
        return broker.placement()

    return {
        "placement": placement,
        "storage_join": join,
        "storage_leave": lambda r: broker.leave(r.owner),
    }


def register(
    broker: Broker, command: RegisterCommand, chunk: paflight.FlightStreamChunk, wait: Wait
) -> Registered:
    """Add rows to a table whose values a storage server has."""
    what = f"register in {command.table}"
    if chunk.app_metadata is None:
        raise InvalidRequestError(f"{what}: each stub must say its first number and its bytes, got nothing")
    note = m.decode(chunk.app_metadata.to_pybytes(), StubNote, what=what)
    check_buffers(command.table, chunk.data, full=False)
    stub = Stub(command.owner, note.first, note.num_bytes)
    outcome = broker.put(command.table, chunk.data, command.writer, wait, stub=stub)
    ack = m.PutAck(
        num_rows=chunk.data.num_rows,
        num_duplicates=outcome.num_duplicates,
        row_ids=outcome.row_ids,
        placement=broker.placement_version,
    )
    return Registered(ack=ack, unused=[index for index, parts in enumerate(outcome.new_parts) if not parts])


def endpoints_of(name: str, spec: TableSpec, shards: Sequence[Shard]) -> list[paflight.FlightEndpoint]:
    """Return where any Flight client reads a table: one endpoint, or one for each that has rows of it."""
    if not shards:
        return [paflight.FlightEndpoint(m.encode(m.ReadTicket(table=name)), [])]
    schema = spec.arrow_schema().serialize().to_pybytes()
    endpoints = []
    for shard in shards:
        ticket: m.Request
        if shard.location:
            ticket = ValuesTicket(arrow_schema=schema, runs=shard.numbers, row_ids=shard.row_ids, table=name)
        else:
            ticket = m.ReadTicket(table=name, uids=shard.uids)
        locations = [shard.location] if shard.location else []
        endpoints.append(paflight.FlightEndpoint(m.encode(ticket), locations))
    return endpoints
