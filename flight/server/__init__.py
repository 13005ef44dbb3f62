"""The Flight face of the broker: requests in, streams and typed errors out. It decides nothing about rows.

DoPut      a table's rows; each batch is acknowledged once it is in the table
DoGet      take (lease), fetch (of a plan) or read rows; lease, status and version are in the stream's schema metadata
           or follow statistics, or ask for the answer to a SELECT
DoExchange rows pushed to a subscriber, and open streams of puts or of takes
DoAction   everything else, JSON in and out
GetFlightInfo, GetSchema, ListFlights: what tables there are, so that any Flight client can look at them

Every error is a FlightServerError with a clean message; its code is in `extra_info`. What is not ours is logged here
with its traceback and leaves as code "internal": the traceback never crosses the wire.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.flight as paflight

from flight import messages as m
from flight import stream_messages as sm
from flight.broker import Broker, ReadRequest, TakeAnswer, Wait
from flight.data.store import cut
from flight.errors import InvalidRequestError
from flight.schema import TableSpec
from flight.server import watching
from flight.server.admission import Admission, Caller
from flight.server.description import bare_errors, described_schema
from flight.server.finishing import check_lease, finish, finishing_actions
from flight.server.guard import CallGuard, next_chunk
from flight.server.idle import PutWatch, StreamLimit
from flight.server.open_streams import PutStreamSession, TakeStreamSession
from flight.server.plans import make_plan, to_fetch
from flight.server.protection import Protection
from flight.server.putting import add_batch, put_shared, sum_up
from flight.server.snapshots import SNAPSHOT_SCHEMA, keeping_actions, snapshot_pieces
from flight.server.sql import SqlEngine
from flight.server.storage import Relay, endpoints_of, register, storage_actions
from flight.server.subscription import serve_subscription
from flight.server.tables import read_dead, table_actions
from flight.shared.host import SharedMemoryHost
from flight.state.ledger import TakeRequest
from flight.storage.messages import ACTIONS as STORAGE_ACTIONS
from flight.storage.messages import RegisterCommand, StorageBeat

ACTIONS = m.ACTIONS | STORAGE_ACTIONS

MAX_DEADLINE_S = 3600.0
"""No call waits longer than this, whatever it asks for."""

MAX_STREAMS = 512
"""Subscriptions and streams of statistics that may be open; each holds one or two threads."""


class QueueServer(paflight.FlightServerBase):
    """Serves a broker from construction until `stop`."""

    def __init__(
        self,
        location: str,
        broker: Broker | None = None,
        *,
        tables: Sequence[TableSpec] = (),
        puts: PutWatch | None = None,
        shared: SharedMemoryHost | None = None,
        protection: Protection | None = None,
    ) -> None:
        self._shared = shared
        self._broker = broker or Broker(lease_prefix=f"{uuid.uuid4().hex[:8]}-")
        for spec in tables:
            self._broker.create_table(spec, exist_ok=self._broker.remembers)
        self._guard = CallGuard(tells_tables=protection is None)
        self._admit = Admission(protection.guard if protection else None, self._broker.list_tables).admit
        self._relay = Relay(self._broker, *([protection.storage_credentials] if protection else []))
        self._sql = SqlEngine(self._broker)
        self._stream = StreamLimit(MAX_STREAMS).open
        self._stopping = threading.Event()
        self._actions: dict[str, Callable[[Any], Any]] = {
            "ping": lambda _: {"tables": len(self._broker.list_tables()), "v": m.PROTOCOL_VERSION},
            "create_table": lambda r: self._broker.create_table(m.to_spec(r), exist_ok=r.exist_ok),
            "drop_table": lambda r: self._broker.drop_table(r.table),
            "describe": lambda r: m.from_spec(self._broker.describe(r.table)),
            "shared_memory": lambda _: self._shared.offer() if self._shared is not None else None,
            "list_tables": lambda _: self._broker.list_tables(),
        }
        for made in (table_actions, finishing_actions, keeping_actions):
            self._actions |= made(self._broker)
        self._actions |= storage_actions(self._broker, self._relay)
        self._broker.relay = self._relay.whole
        self._puts = puts or PutWatch()
        self._puts.start()
        super().__init__(location, **(protection.options() if protection else {}))

    def stop(self, grace_s: float) -> bool:
        """Refuse new calls, wake those that wait, and wait up to `grace_s` for them; return whether all have ended.

        Not `shutdown()`, which has no deadline and hangs while any call is open (pyarrow 26).
        """
        self._stopping.set()
        self._broker.close()
        if self._shared is not None:
            self._shared.close()
        has_ended = self._guard.wait_idle(grace_s, lambda: self._puts.num_silent)
        self._relay.close()
        return has_ended

    # ---- Flight -----------------------------------------------------------------------------------------------

    def do_put(
        self,
        context: paflight.ServerCallContext,
        descriptor: paflight.FlightDescriptor,
        reader: paflight.MetadataRecordBatchReader,
        writer: paflight.FlightMetadataWriter,
    ) -> None:
        """Add batches to a table, acknowledging each, or all at the end."""
        with self._call("put"), self._puts.open(context.peer()) as put:
            command = _put_command(descriptor)
            caller = self._admit(context, command)
            wait, reader = self._wait(caller, command.deadline_s), caller.reader(reader)
            acks: list[m.PutAck] = []
            while (chunk := next_chunk(reader, put)) is not None:
                if chunk.data is None:
                    raise InvalidRequestError(
                        f"put into {command.table}: message must hold a batch, got metadata only"
                    )
                if isinstance(command, RegisterCommand):
                    writer.write(m.encode(register(self._broker, command, chunk, wait)))
                    continue
                acks.append(add_batch(self._broker, command, chunk.data, wait))
                if command.acks == "each":
                    writer.write(m.encode(acks.pop()))
            if isinstance(command, m.PutCommand) and command.acks == "last":
                writer.write(m.encode(sum_up(acks)))

    def do_get(
        self, context: paflight.ServerCallContext, ticket: paflight.Ticket
    ) -> paflight.RecordBatchStream:
        """Take or read rows."""
        with self._call("get"):
            request: m.GetTicket = m.decode(ticket.ticket, m.GetTicket, what="ticket")
            caller = self._admit(context, request)
            if isinstance(request, m.ReadTicket):
                is_dead = request.state == "dead"
                return self._rows(
                    read_dead(self._broker, request) if is_dead else self._read(request), request
                )
            if isinstance(request, m.WatchTicket):
                return paflight.GeneratorStream(watching.SCHEMA, self._watch(caller, request))
            if isinstance(request, m.SnapshotTicket):
                pieces = self._streamed("snapshot", snapshot_pieces(self._broker))
                return paflight.GeneratorStream(SNAPSHOT_SCHEMA, pieces)
            if isinstance(request, m.SqlTicket):
                self._wait(caller, request.deadline_s)
                tables = caller.visible("read", self._broker.list_tables())
                rows = self._sql.query(
                    request.query, tables, max_rows=request.max_rows, deadline_s=request.deadline_s
                )
                return self._rows(rows, request)
            if isinstance(request, m.FetchTicket):
                found = self._broker.fetch(request.table, to_fetch(request), is_direct=request.endpoints)
                return self._rows(found, request)
            wait = self._wait(caller, request.deadline_s)
            if request.ack is not None:
                finish(self._broker, request.table, request.consumer, request.ack)
            answer = self._take(request, wait)
            notes = {
                "status": answer.status,
                "lease_id": answer.lease_id,
                "policy_version": str(answer.policy_version),
                "num_rows": str(answer.table.num_rows),
            }
            if answer.max_staleness is not None:
                notes |= {"max_staleness": str(answer.max_staleness), "staleness_policy": str(answer.policy)}
            notes |= answer.table.schema.metadata or {}
            return self._rows(answer.table.replace_schema_metadata(notes), request)

    def do_exchange(
        self,
        context: paflight.ServerCallContext,
        descriptor: paflight.FlightDescriptor,
        reader: paflight.MetadataRecordBatchReader,
        writer: paflight.MetadataRecordBatchWriter,
    ) -> None:
        """Push rows to a subscriber, or answer puts or takes, until the client closes the stream."""
        with self._call("exchange"), self._stream():
            request = m.decode(descriptor.command or b"", sm.Exchange, what="stream descriptor")
            caller = self._admit(context, request)
            host, reader = caller.memory(self._shared), caller.reader(reader)
            if isinstance(request, sm.Subscribe):
                serve_subscription(self._broker, host, request, reader, writer, caller)
                return
            make = PutStreamSession if isinstance(request, sm.PutStream) else TakeStreamSession
            session = make(self._broker, host, request, partial(self._wait, caller))
            session.serve(reader, writer, self._puts, context.peer())

    def do_action(self, context: paflight.ServerCallContext, action: paflight.Action) -> Iterator[bytes]:
        """Do what docs/protocol.md lists, answering one JSON value."""
        with self._call(f"action {action.type}"):
            if action.type not in ACTIONS:
                raise InvalidRequestError(f"action: type must be one of {list(ACTIONS)}, got {action.type!r}")
            body = action.body.to_pybytes() or b"{}"
            request = m.decode(body, ACTIONS[action.type][0], what=f"action {action.type}")
            caller = self._admit(context, request, action.type)
            if isinstance(request, m.PlanRequest):
                answer = m.encode(make_plan(self._broker, request, self._wait(caller, request.deadline_s)))
            elif isinstance(request, m.PutShared):
                wait = self._wait(caller, request.deadline_s)
                answer = m.encode(put_shared(self._broker, caller.memory(self._shared), request, wait))
            elif isinstance(request, StorageBeat):
                answer = m.encode(self._broker.beat(request, self._wait(caller, request.deadline_s)))
            else:
                answer = m.encode(caller.answer(self._actions, action.type, request))
        return iter([answer])

    def list_actions(self, context: paflight.ServerCallContext) -> list[tuple[str, str]]:
        """Return the actions and what they do."""
        with self._call("list actions"):
            self._admit(context, m.Request(), "list_actions")
        return [(name, what) for name, (_, what) in ACTIONS.items()]

    def list_flights(
        self, context: paflight.ServerCallContext, criteria: bytes
    ) -> Iterator[paflight.FlightInfo]:
        """Describe every table; `criteria` is ignored."""
        with self._call("list"):
            caller = self._admit(context, m.Request(), "list_flights")
            infos = [self._info(name) for name in caller.visible("look", self._broker.list_tables())]
        return iter(infos)

    def get_flight_info(
        self, context: paflight.ServerCallContext, descriptor: paflight.FlightDescriptor
    ) -> paflight.FlightInfo:
        """Describe the table that the descriptor's path names; its endpoint's ticket reads all rows."""
        with self._call("info"):
            self._admit(context, m.TableRequest(table=_path(descriptor)), "get_flight_info")
            return self._info(_path(descriptor))

    def get_schema(
        self, context: paflight.ServerCallContext, descriptor: paflight.FlightDescriptor
    ) -> paflight.SchemaResult:
        """Return the Arrow schema of the table that the descriptor's path names."""
        with bare_errors(), self._call("schema"):
            self._admit(context, m.TableRequest(table=_path(descriptor)), "get_schema")
            return paflight.SchemaResult(described_schema(self._broker.describe(_path(descriptor))))

    # ---- parts ------------------------------------------------------------------------------------------------

    def _rows(
        self, table: pa.Table, request: m.TakeTicket | m.ReadTicket | m.FetchTicket | m.SqlTicket
    ) -> paflight.RecordBatchStream:
        shared = None
        if self._shared is not None and request.shared is not None:
            shared = self._shared.share(table, request.shared)
        return paflight.RecordBatchStream(cut(table) if shared is None else shared)

    def _take(self, request: m.TakeTicket, wait: Wait) -> TakeAnswer:
        take = TakeRequest(
            consumer=request.consumer,
            max_rows=request.max_rows,
            min_rows=request.min_rows,
            policy_version=request.policy_version,
            lease_s=check_lease(request.lease_s),
            member=request.identity,
        )
        return self._broker.take(request.table, take, request.columns, wait, is_direct=request.endpoints)

    def _watch(self, caller: Caller, request: m.WatchTicket) -> Iterator[pa.RecordBatch]:
        """Check the request now, and yield ticks while the stream is read."""
        deadline = self._wait(caller, request.deadline_s).deadline
        found = watching.ticks(
            self._broker,
            request.tables,
            interval_s=watching.check_interval(request.interval_s),
            deadline=deadline,
            pause=lambda seconds: not self._stopping.wait(seconds) and not caller.is_cancelled(),
            visible=partial(caller.visible, "read"),
        )
        for name in request.tables or ():
            self._broker.describe(name)

        return self._streamed("watch", found)

    def _streamed(self, what: str, found: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield what is found while the stream is read."""
        with self._call(what), self._stream():
            yield from found

    def _read(self, request: m.ReadTicket) -> pa.Table:
        if request.max_rows is not None and request.max_rows < 0:
            raise InvalidRequestError(
                f"read {request.table}: max_rows must be 0 or more, got {request.max_rows}"
            )
        return self._broker.read(
            request.table,
            ReadRequest(
                columns=request.columns,
                uids=request.uids,
                max_rows=request.max_rows,
                newest=request.newest,
                first_row_id=request.row_ids.first if request.row_ids else None,
                last_row_id=request.row_ids.last if request.row_ids else None,
                filter=request.filter,
            ),
            is_direct=request.endpoints,
        )

    def _info(self, name: str) -> paflight.FlightInfo:
        spec = self._broker.describe(name)
        num_rows, num_bytes = self._broker.size(name)
        endpoints = endpoints_of(name, spec, self._broker.shards(name))
        descriptor = paflight.FlightDescriptor.for_path(name)
        return paflight.FlightInfo(described_schema(spec), descriptor, endpoints, num_rows, num_bytes)

    def _wait(self, caller: Caller, deadline_s: float) -> Wait:
        if not 0 <= deadline_s <= MAX_DEADLINE_S:
            raise InvalidRequestError(
                f"request: deadline_s must be from 0 to {MAX_DEADLINE_S:.0f}, got {deadline_s}"
            )
        return Wait(deadline=self._broker.clock() + deadline_s, is_gone=caller.is_cancelled)

    def _call(self, what: str) -> AbstractContextManager[None]:
        """Count a call and turn what goes wrong in it into what may cross the wire."""
        return self._guard.call(what)


def _path(descriptor: paflight.FlightDescriptor) -> str:
    path = descriptor.path
    if descriptor.descriptor_type != paflight.DescriptorType.PATH or not path or len(path) != 1:
        raise InvalidRequestError(
            f"descriptor: must be a path of one table name, got {path or descriptor.command!r}"
        )
    return path[0].decode("utf-8", "backslashreplace")


def _put_command(descriptor: paflight.FlightDescriptor) -> m.PutCommand | RegisterCommand:
    if descriptor.descriptor_type == paflight.DescriptorType.PATH:
        return m.PutCommand(table=_path(descriptor))
    return m.decode(descriptor.command or b"", m.PutCommand | RegisterCommand, what="put descriptor")
