"""The Flight face of a storage server: rows in from producers, values out to readers. It decides nothing about rows.

DoPut     as to a queue server: each batch is kept here and registered with the coordinator before it is acknowledged
DoGet     values by their numbers
DoAction  ping, and shared memory for clients of this host
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.flight as paflight

from flight import messages as m
from flight.data.batches import check_batch, check_buffers, check_schema
from flight.data.store import cut, retain
from flight.errors import InvalidRequestError, SchemaMismatchError
from flight.schema import TableSpec
from flight.server.admission import Admission
from flight.server.guard import CallGuard, next_chunk
from flight.server.idle import PutWatch
from flight.server.protection import Protection
from flight.server.putting import MAX_BATCH_BYTES, fills_its_message, sum_up
from flight.shared.host import SharedMemoryHost
from flight.storage.addresses import from_runs
from flight.storage.member import Registrar, Seat
from flight.storage.messages import Registered, ValuesTicket
from flight.storage.stubs import make_stub, num_remote_bytes

ACTIONS: dict[str, type[m.Request]] = {
    "ping": m.Request,
    "shared_memory": m.Request,
    "put_shared": m.PutShared,
}


class StorageServer(paflight.FlightServerBase):
    """Serves the values of a seat from construction until `stop`."""

    def __init__(
        self,
        location: str,
        seat: Seat,
        *,
        puts: PutWatch | None = None,
        shared: SharedMemoryHost | None = None,
        protection: Protection | None = None,
    ) -> None:
        self._seat = seat
        self._values = seat.values
        self._shared = shared
        self._guard = CallGuard()
        self._admit = Admission(protection.guard if protection else None, list).admit
        self._puts = puts or PutWatch()
        self._puts.start()
        super().__init__(location, **(protection.options() if protection else {}))

    def stop(self, grace_s: float) -> bool:
        """Take no rows any more, and wait up to `grace_s` for open calls; return whether all have ended."""
        self._values.close()
        if self._shared is not None:
            self._shared.close()
        return self._guard.wait_idle(grace_s, lambda: self._puts.num_silent)

    def do_put(
        self,
        context: paflight.ServerCallContext,
        descriptor: paflight.FlightDescriptor,
        reader: paflight.MetadataRecordBatchReader,
        writer: paflight.FlightMetadataWriter,
    ) -> None:
        """Keep batches and register them, acknowledging each, or all at the end."""
        with self._guard.call("put"), self._puts.open(context.peer()) as put:
            command = m.decode(descriptor.command or b"", m.PutCommand, what="put descriptor")
            reader = self._admit(context, command).reader(reader)
            self._values.check_open()
            with self._seat.registering(command) as registrar:
                acks: list[m.PutAck] = []
                while (chunk := next_chunk(reader, put)) is not None:
                    if chunk.data is None:
                        raise InvalidRequestError(
                            f"put into {command.table}: message must hold a batch, got metadata only"
                        )
                    acks.append(self._add(command, chunk.data, registrar))
                    if command.acks == "each":
                        writer.write(m.encode(acks.pop()))
                if command.acks == "last":
                    writer.write(m.encode(sum_up(acks)))

    def do_get(
        self, context: paflight.ServerCallContext, ticket: paflight.Ticket
    ) -> paflight.RecordBatchStream:
        """Return values."""
        with self._guard.call("get"):
            request = m.decode(ticket.ticket, ValuesTicket, what="ticket")
            self._admit(context, request)
            numbers = from_runs("ticket: runs", request.runs)
            row_ids = from_runs("ticket: row_ids", request.row_ids)
            if len(numbers) != len(row_ids):
                raise InvalidRequestError(
                    f"ticket: row_ids must be as many as runs stand for, {len(numbers)}, got {len(row_ids)}"
                )
            try:
                schema = pa.ipc.read_schema(pa.py_buffer(request.arrow_schema))
            except (pa.ArrowException, OSError) as error:
                raise InvalidRequestError(
                    f"ticket: arrow_schema must be an Arrow IPC schema, got: {error}"
                ) from error
            found = self._values.find(schema, numbers, row_ids, table=request.table)
            shared = None
            if self._shared is not None and request.shared is not None:
                shared = self._shared.share(found, request.shared)
            return paflight.RecordBatchStream(cut(found) if shared is None else shared)

    def do_action(self, context: paflight.ServerCallContext, action: paflight.Action) -> Iterator[bytes]:
        """Do what docs/protocol.md lists, answering one JSON value."""
        with self._guard.call(f"action {action.type}"):
            if action.type not in ACTIONS:
                raise InvalidRequestError(
                    f"action: type must be one of {list(ACTIONS)} on a storage server, got {action.type!r}; "
                    "ask its coordinator"
                )
            body = action.body.to_pybytes() or b"{}"
            request = m.decode(body, ACTIONS[action.type], what=f"action {action.type}")
            caller = self._admit(context, request, action.type)
            shared = caller.memory(self._shared)
            answer: Any = {"v": m.PROTOCOL_VERSION, "rows": len(self._values)}
            if isinstance(request, m.PutShared):
                answer = self._put_shared(shared, request)
            elif action.type == "shared_memory":
                answer = shared.offer() if shared is not None else None
        return iter([m.encode(answer)])

    def list_actions(self, context: paflight.ServerCallContext) -> list[tuple[str, str]]:
        """Return the actions."""
        with self._guard.call("list actions"):
            self._admit(context, m.Request(), "list_actions")
        return [(name, m.ACTIONS[name][1]) for name in ACTIONS]

    def _put_shared(self, shared: SharedMemoryHost | None, request: m.PutShared) -> list[m.PutAck]:
        if shared is None:
            raise InvalidRequestError("put_shared: the server must have shared memory, got one without")
        self._values.check_open()
        batches = shared.adopt(request.connection, request.slots)
        with self._seat.registering(request) as registrar:
            return [self._add(request, batch, registrar) for batch in batches]

    def _add(
        self, command: m.PutCommand | m.PutShared, batch: pa.RecordBatch, registrar: Registrar
    ) -> m.PutAck:
        """Keep a batch and register it; what lies in shared memory, or fills its message, is kept where it lies."""
        check_buffers(command.table, batch, full=False)
        if batch.nbytes > MAX_BATCH_BYTES:
            raise InvalidRequestError(
                f"put into {command.table}: batch must be at most {MAX_BATCH_BYTES} bytes, "
                f"got {batch.nbytes}; cut it to 1 to 4 MB"
            )
        spec = self._seat.describe(command.table)
        try:
            fit = check_schema(spec, batch.schema, command.writer)
        except SchemaMismatchError:
            # The table may have been changed since it was described here.
            spec = self._seat.describe(command.table, anew=True)
            fit = check_schema(spec, batch.schema, command.writer)
        check_batch(spec, batch, fit)
        can_stay = isinstance(command, m.PutShared) or fills_its_message(batch)
        batch = _with_group_ids(batch)
        kept = batch if can_stay else retain(batch)
        first = self._values.add(kept, command.table)
        answer = None
        try:
            answer = self._register(spec, kept, first, registrar)
        finally:
            if answer is None:
                self._seat.settle(first, kept.num_rows)
        self._values.free([(first + index, 1) for index in answer.unused])
        return answer.ack

    def _register(
        self, spec: TableSpec, batch: pa.RecordBatch, first: int, registrar: Registrar
    ) -> Registered:
        owner = registrar.command.owner
        try:
            return registrar.register(
                make_stub(spec, batch, owner, first), first, num_remote_bytes(spec, batch)
            )
        except SchemaMismatchError:
            # What stays with the coordinator depends on the table, which may have been changed.
            now = self._seat.describe(spec.name, anew=True)
            if now == spec:
                raise
        return registrar.register(make_stub(now, batch, owner, first), first, num_remote_bytes(now, batch))


def _with_group_ids(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch whose rows all say their group: readers who come here see no other key."""
    uids = batch.column("uid")
    if "group_id" not in batch.schema.names:
        return batch.append_column("group_id", uids)
    index = batch.schema.get_field_index("group_id")
    groups = batch.column(index)
    if not groups.null_count and not pc.any(pc.equal(groups, "")).as_py():
        return batch
    is_empty = pc.fill_null(pc.equal(groups, ""), True)
    return batch.set_column(index, "group_id", pc.if_else(is_empty, uids, groups))
