"""Shared memory of a client: asks the server for it once, and uses it for what is large enough. It decides no row."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as paflight

from flight import messages as m
from flight.data.sending import size_of
from flight.data.store import cut
from flight.errors import InvalidRequestError
from flight.shared import wire
from flight.shared.guest import Guest

SLOT_BYTES = 16 << 20
"""Rows that are put together are cut into slots of about this size, a row at least."""

NEGOTIATION = paflight.FlightCallOptions(timeout=10.0)


class Written:
    """Rows that lie in slots of shared memory until `free`."""

    def __init__(self, guest: Guest, grant: int, slots: list[int]) -> None:
        self.connection = guest.connection
        self.slots = slots
        self._guest = guest
        self._grant = grant

    def free(self) -> None:
        """Let go of the slots; what the server keeps it holds itself."""
        self._guest.free(self._grant)


class SharedMemory:
    """A seat at the server's arena if there is one on this host; without one, everything goes over the stream."""

    def __init__(self, identity: str, *, is_on: bool) -> None:
        self._identity = identity
        self._is_on = is_on
        self._is_offered = True
        self._guest: Guest | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Leave; views of what was taken stay valid. A later call asks again. Idempotent."""
        with self._lock:
            self._guest = None
            self._is_offered = True

    def get(
        self, client: paflight.FlightClient, ticket: Any, options: paflight.FlightCallOptions
    ) -> pa.Table:
        """Do a DoGet and return its rows."""
        guest = None
        if "shared" in ticket.__struct_fields__:
            guest = self.seat(client)
        if guest is None:
            return _read(client.do_get(paflight.Ticket(m.encode(ticket)), options))
        grant = guest.new_grant()
        shared = m.SharedRef(connection=guest.connection, grant=grant)
        asked = m.encode(msgspec.structs.replace(ticket, shared=shared))
        try:
            return guest.open(_read(client.do_get(paflight.Ticket(asked), options)), grant)
        except BaseException:
            # The server may have granted what has not arrived here, or may do so yet.
            guest.free(grant)
            raise

    def put(
        self,
        client: paflight.FlightClient,
        command: m.PutCommand,
        rows: pa.Table,
        options: paflight.FlightCallOptions,
    ) -> list[m.PutAck] | None:
        """Put rows through shared memory; None if they must go over the stream."""
        written = self.write(client, rows)
        if written is None:
            return None
        try:
            request = m.PutShared(
                table=command.table,
                writer=command.writer,
                deadline_s=command.deadline_s,
                identity=command.identity,
                connection=written.connection,
                slots=written.slots,
            )
            [answer] = client.do_action(paflight.Action("put_shared", m.encode(request)), options)
            return m.decode(memoryview(answer.body), list[m.PutAck], what="put acknowledgement")
        finally:
            written.free()

    def write(self, client: paflight.FlightClient, rows: pa.Table) -> Written | None:
        """Write rows into slots that are to be freed once the server has them; None if they must go over the stream."""
        if not rows.num_rows or size_of(rows, wire.SMALL_BYTES) < wire.SMALL_BYTES:
            return None
        guest = self.seat(client)
        if guest is None:
            return None
        grant = guest.new_grant()
        try:
            pieces = _pieces(rows)
            if len(pieces) <= wire.MAX_SLOTS and (slots := guest.write(pieces, grant)) is not None:
                return Written(guest, grant, slots)
        except BaseException:
            guest.free(grant)
            raise
        guest.free(grant)
        return None

    def seat(self, client: paflight.FlightClient) -> Guest | None:
        """Return this client's seat at the server's arena, None if there is none."""
        if not self._is_on:
            return None
        with self._lock:
            if self._guest is not None and not self._guest.is_connected:
                self._guest = None
            if self._guest is None and self._is_offered:
                self._guest = self._join(client)
                self._is_offered = self._guest is not None
            return self._guest

    def _join(self, client: paflight.FlightClient) -> Guest | None:
        action = paflight.Action("shared_memory", m.encode(m.Request(identity=self._identity)))
        try:
            [answer] = client.do_action(action, NEGOTIATION)
        except paflight.FlightServerError as error:
            # A server that does not know the word has none; whatever else is wrong is the caller's to hear.
            if isinstance(m.to_error(error.extra_info), InvalidRequestError):
                return None
            raise
        offer = m.decode(memoryview(answer.body), m.SharedMemoryOffer | None, what="shared memory")
        if offer is None or not offer.boot_id or offer.boot_id != wire.boot_id():
            return None
        try:
            return Guest(offer)
        except OSError:
            return None  # Another container of this host, or another user's server: no common memory.


def _read(reader: paflight.FlightStreamReader) -> pa.Table:
    # Not read_all(): it turns a cancelled stream into a KeyboardInterrupt of the main thread (pyarrow 26).
    return pa.Table.from_batches([chunk.data for chunk in reader], reader.schema)


def _pieces(rows: pa.Table) -> list[pa.RecordBatch]:
    """Cut rows into slots: few, as each costs the server a fixed time; small ones free their memory sooner."""
    return cut(rows, max(SLOT_BYTES, 2 * rows.nbytes // wire.MAX_SLOTS)).to_batches()
