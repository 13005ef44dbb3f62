"""Storage servers as a client meets them: rows go to them in turn, and come from them directly.

Nothing here happens while there are none: a client hears of them in the acknowledgement of a put, or asks once before
its first large one. Small rows go to the coordinator, as does everything that no storage server takes. What does not
come from a storage server is asked of the coordinator, which fetches it, or finds that it is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.flight as paflight
import structlog

from flight import messages as m
from flight.client.connection import Connection, within
from flight.client.credentials import Credentials
from flight.client.gathering import Part, gather_rows, is_elsewhere
from flight.client.sharing import SharedMemory
from flight.errors import (
    CapacityError,
    DeadlineExceededError,
    InvalidRequestError,
    LeaseLostError,
    OverloadedError,
    UnavailableError,
)
from flight.storage.messages import OwnerInfo, Placement, ValuesTicket
from flight.storage.rotation import AVOID_FAILED_S, AVOID_FULL_S, Rotation
from flight.storage.stubs import num_large_bytes

MIN_BYTES = 64 << 10
"""Rows with less than this go to the coordinator, which has to hear of them anyhow."""

ASK_BYTES = 1 << 20
"""A put of so much asks who takes rows, once."""

BLOCK_BYTES = 16 << 20
"""What one storage server gets at least before it is the next one's turn, an equal share of a large put."""

LOST_WITH = b"lost_with"
"""Metadata key of an answer of which rows were lost on the way: the storage servers that did not answer."""

LOG = structlog.get_logger("flight.client.owners")

PutRows = Callable[[paflight.FlightClient, m.PutCommand, pa.Table, SharedMemory], list[m.PutAck]]
"""Streams rows to one server."""


class OwnerConnections:
    """One connection a storage server, made on first use with what `credentials` then returns. Thread-safe."""

    def __init__(
        self,
        identity: str,
        *,
        shared_memory: bool,
        credentials: Callable[[], Credentials | None] = lambda: None,
    ) -> None:
        self._identity = identity
        self._shared_memory = shared_memory
        self._credentials = credentials
        self._open: dict[str, tuple[Connection, SharedMemory]] = {}
        self._lock = threading.Lock()

    def to(self, location: str) -> tuple[Connection, SharedMemory]:
        """Return the connection to a storage server, and its shared memory if it is on this host."""
        with self._lock:
            if location not in self._open:
                seat = SharedMemory(self._identity, is_on=self._shared_memory)
                self._open[location] = (Connection(location, self._credentials()), seat)
            return self._open[location]

    def values(self, part: Part, deadline_s: float, *, retry: bool = False) -> pa.Table:
        """Return rows with row_id and their columns; what the storage server has no more is left out.

        Raises:
            UnavailableError: it does not answer.
        """
        if not part.endpoint.location:
            raise UnavailableError(f"read {part.table}: owner {part.endpoint.owner} must be there, got none")
        ticket = ValuesTicket(
            arrow_schema=part.schema.serialize().to_pybytes(),
            runs=part.endpoint.runs,
            row_ids=part.row_id_runs(),
            table=part.table,
            identity=self._identity,
        )
        connection, shared = self.to(part.endpoint.location)
        return connection.repeat(
            f"read {part.table}",
            lambda client: shared.get(client, ticket, within(deadline_s)),
            retry=retry,
        )

    def ping(self, location: str, deadline_s: float) -> None:
        """Return if a server answers there."""
        connection, _ = self.to(location)
        action = paflight.Action("ping", m.encode(m.Request(identity=self._identity)))
        options = paflight.FlightCallOptions(timeout=deadline_s)
        connection.repeat("ping", lambda client: list(client.do_action(action, options)), retry=False)

    def forget(self, location: str) -> None:
        """Use another connection from now on. The old one is not closed, as others may be in the middle of a call."""
        with self._lock:
            self._open.pop(location, None)

    def close(self) -> None:
        """Close all. Idempotent."""
        with self._lock:
            found, self._open = list(self._open.values()), {}
        for connection, shared in found:
            shared.close()
            connection.close()


class Owners:
    """The storage servers of one coordinator. `act` asks it, `read` reads from it what it must fetch itself.

    They are shown the same `credentials` as it.
    """

    def __init__(
        self,
        identity: str,
        *,
        shared_memory: bool,
        credentials: Credentials | None = None,
        act: Callable[[str, m.Request], Any],
        read: Callable[[m.ReadTicket], pa.Table],
    ) -> None:
        self._identity = identity
        self._act = act
        self._read = read
        self._connections = OwnerConnections(
            identity, shared_memory=shared_memory, credentials=lambda: credentials
        )
        self._rotation = Rotation(start=hash(identity) % 997)
        self._has_asked = False
        self._newest = 0
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections; a later call asks again who there is. Idempotent."""
        self._connections.close()
        self._has_asked = False

    # ---- rows out ---------------------------------------------------------------------------------------------

    def put(
        self, command: m.PutCommand, rows: pa.Table, put_rows: PutRows
    ) -> tuple[list[m.PutAck], pa.Table]:
        """Put rows with storage servers, in order; return what they acknowledged, and the rows that are not theirs."""
        acks: list[m.PutAck] = []
        if not self._newest and (self._has_asked or not _is_large(rows)):
            return acks, rows
        self._look()
        if not self._rotation or num_large_bytes(rows) < MIN_BYTES:
            return acks, rows
        block_bytes = max(BLOCK_BYTES, rows.nbytes // len(self._rotation) + 1)
        block_rows = max(1, rows.num_rows * block_bytes // rows.nbytes)
        for start in range(0, rows.num_rows, block_rows):
            done = self._put_block(command, rows.slice(start, block_rows), put_rows)
            if done is None:
                return acks, rows.slice(start)
            acks += done
        return acks, rows.slice(rows.num_rows)

    def hear(self, acks: list[m.PutAck]) -> None:
        """Note of which placement acknowledgements speak."""
        self._newest = max([self._newest, *(ack.placement for ack in acks)])

    def _look(self) -> None:
        """Ask who takes rows if nobody has, or if there is news."""
        with self._lock:
            if self._has_asked and self._rotation.version >= self._newest:
                return
            self._has_asked = True
            try:
                answer = self._act("placement", m.Request(identity=self._identity))
            except InvalidRequestError:
                return  # A server that does not know the word has no storage servers.
            placement = msgspec.convert(answer, Placement)
            self._newest = max(self._newest, placement.version)
            self._rotation.adopt(placement)

    def _put_block(self, command: m.PutCommand, block: pa.Table, put_rows: PutRows) -> list[m.PutAck] | None:
        """Put rows with the next storage server that takes them; None if none does."""
        while (owner := self._next()) is not None:
            connection, shared = self._connections.to(owner.location)

            def once(client: paflight.FlightClient, shared: SharedMemory = shared) -> list[m.PutAck]:
                return put_rows(client, command, block, shared)

            try:
                return connection.repeat(f"put into {command.table}", once, retry=False)
            except UnavailableError as error:
                self._avoid(owner, AVOID_FAILED_S)
                self._is_gone(owner.location, error)
                self._look()
            except (OverloadedError, CapacityError):
                self._avoid(owner, AVOID_FULL_S)
        return None

    def _is_gone(self, location: str, error: Exception) -> None:
        """Note that a storage server did not answer; who takes rows is asked anew."""
        self._connections.forget(location)
        with self._lock:
            self._has_asked = False
            is_first = location not in self._warned
            self._warned.add(location)
        if is_first:
            LOG.warning(
                "a storage server does not answer, its coordinator is asked",
                location=location,
                error=str(error),
            )

    def _next(self) -> OwnerInfo | None:
        with self._lock:
            return self._rotation.next()

    def _avoid(self, owner: OwnerInfo, for_s: float) -> None:
        with self._lock:
            self._rotation.avoid(owner.owner, for_s)

    # ---- rows in ----------------------------------------------------------------------------------------------

    def complete(self, ticket: m.Request, rows: pa.Table, deadline_s: float) -> pa.Table:
        """Return an answer with the columns that lie with storage servers; rows whose values are lost are left out.

        Raises:
            LeaseLostError: they are rows of a plan, which is void then.
        """
        if not is_elsewhere(rows):
            return rows
        failed: set[str] = set()
        found, num_missing = gather_rows(rows, lambda part: self._fetch(part, deadline_s, failed))
        if not num_missing:
            return found
        table = ticket.table if isinstance(ticket, m.TakeTicket | m.ReadTicket | m.FetchTicket) else ""
        where = f"values of {num_missing} rows of {table} must be with their storage servers, got none from "
        if isinstance(ticket, m.FetchTicket):
            raise LeaseLostError(f"fetch: {where}{sorted(failed)}; ask for the plan again")
        LOG.warning("rows were lost", table=table, num_rows=num_missing, locations=sorted(failed))
        uids = found.column("uid").to_pylist()
        there = self._read(m.ReadTicket(table=table, uids=uids, columns=[], identity=self._identity))
        left = found.filter(pc.is_in(found.column("row_id"), there.column("row_id").combine_chunks()))
        return left.replace_schema_metadata(
            (left.schema.metadata or {}) | {LOST_WITH: ", ".join(sorted(failed))}
        )

    def _fetch(self, part: Part, deadline_s: float, failed: set[str]) -> pa.Table:
        if part.endpoint.owner:
            try:
                return self._connections.values(part, deadline_s)
            except (UnavailableError, DeadlineExceededError) as error:
                location = part.endpoint.location
                failed.add(location)
                self._is_gone(location, error)
        ticket = m.ReadTicket(
            table=part.table, uids=part.uids(), columns=part.endpoint.columns, identity=self._identity
        )
        return self._read(ticket)


def _is_large(rows: pa.Table) -> bool:
    # The size of all buffers is never less, and found fifty times as fast: most puts are small.
    return rows.get_total_buffer_size() >= ASK_BYTES and rows.nbytes >= ASK_BYTES
