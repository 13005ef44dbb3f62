"""A storage server's seat at its coordinator: joins, registers rows, and hears what is free. It serves nobody.

One thread beats for as long as the process runs. If the coordinator does not know this server (it was given up, or the
coordinator was started anew), all values are void: they are cleared, and the server joins again under a new number.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as paflight
import structlog

from flight import messages as m
from flight.client.connection import Connection, within
from flight.client.credentials import Credentials
from flight.errors import FlightQueueError, UnavailableError
from flight.schema import TableSpec
from flight.storage.messages import (
    BeatAnswer,
    RegisterCommand,
    Registered,
    StorageBeat,
    StorageJoin,
    StorageLeave,
    StubNote,
)
from flight.storage.values import ValueStore

BEAT_S = 1.0
"""How long the coordinator may keep a beat if it has nothing to say."""

REST_S = 0.05
"""Pause between beats: what is freed meanwhile is said together."""

RETRY_S = 0.5
"""Pause after a beat that found no coordinator."""

CALL_S = 10.0

LOG = structlog.get_logger("flight.storage")


class Seat:
    """Membership of one storage server. `join`, then `start`. Thread-safe."""

    def __init__(
        self, coordinator: str, values: ValueStore, *, identity: str, credentials: Credentials | None = None
    ) -> None:
        self.values = values
        self.owner = 0
        """The number that the coordinator gave; another one after it gave this server up."""
        self._identity = identity
        self._connection = Connection(coordinator, credentials)
        self._location = ""
        self._specs: dict[str, TableSpec] = {}
        self._unsettled: dict[int, int] = {}
        self._heard = 0
        self._is_leaving = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="storage-beats", daemon=True)

    # ---- membership -------------------------------------------------------------------------------------------

    def join(self, location: str) -> None:
        """Join the coordinator, which must reach this server at `location`.

        Raises:
            UnavailableError: there is no coordinator.
            InvalidRequestError: it does not reach this server, or is no coordinator.
        """
        self._location = location
        request = StorageJoin(
            location=location, capacity_bytes=self.values.capacity_bytes, identity=self._identity
        )
        owner = self._act("storage_join", request, retry=True)
        self._heard, self.owner = 0, msgspec.convert(owner, int)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def drain(self, deadline_s: float, stop: threading.Event) -> int:
        """Have no more rows come and wait until all are gone, or `stop`; return how many are left."""
        self._is_leaving = True
        self.values.close()
        left_s = deadline_s
        while len(self.values) and left_s > 0 and not stop.wait(REST_S):
            left_s -= REST_S
        return len(self.values)

    def leave(self) -> None:
        """Stop beating and tell the coordinator; what is left here is lost."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(BEAT_S + CALL_S)
        with suppress(FlightQueueError):
            self._act("storage_leave", StorageLeave(owner=self.owner, identity=self._identity))
        self._connection.close()

    def _run(self) -> None:
        while not self._stop.wait(REST_S):
            try:
                self._beat()
            except FlightQueueError as error:
                LOG.warning("the coordinator does not answer", error=str(error))
                self._stop.wait(RETRY_S)

    def _beat(self) -> None:
        unsettled = dict(self._unsettled)
        beat = StorageBeat(
            owner=self.owner,
            used_bytes=self.values.used_bytes,
            heard=self._heard,
            unsettled=list(unsettled),
            is_leaving=self._is_leaving,
            deadline_s=BEAT_S,
            identity=self._identity,
        )
        answer = msgspec.convert(self._act("storage_beat", beat), BeatAnswer)
        if not answer.is_known:
            LOG.warning(
                "the coordinator does not know this server, it joins again", num_rows=len(self.values)
            )
            self.values.clear()
            self._unsettled.clear()
            self._specs.clear()
            self.join(self._location)
            return
        self._heard = answer.seq
        self.values.free(answer.free)
        for first, num_rows in unsettled.items():
            if first not in answer.settled:
                self.values.free([(first, num_rows)] if num_rows else [])
            self._unsettled.pop(first, None)

    # ---- rows -------------------------------------------------------------------------------------------------

    def describe(self, table: str, *, anew: bool = False) -> TableSpec:
        """Return what a table is; remembered unless it is asked for `anew`."""
        spec = None if anew else self._specs.get(table)
        if spec is None:
            answer = self._act("describe", m.TableRequest(table=table, identity=self._identity), retry=True)
            spec = self._specs[table] = m.to_spec(msgspec.convert(answer, m.CreateTable))
        return spec

    @contextmanager
    def registering(self, command: m.PutCommand | m.PutShared) -> Iterator[Registrar]:
        """Open a stream on which the rows of one put are registered."""
        registrar = Registrar(
            self._connection,
            RegisterCommand(
                table=command.table,
                writer=command.writer,
                owner=self.owner,
                deadline_s=command.deadline_s,
                identity=command.identity,
            ),
        )
        try:
            yield registrar
        finally:
            registrar.close()

    def settle(self, first: int, num_rows: int) -> None:
        """Note a batch whose registration was not answered: the next beat asks what became of it."""
        self._unsettled[first] = num_rows

    def _act(self, name: str, request: m.Request, *, retry: bool = False) -> Any:
        action = paflight.Action(name, m.encode(request))

        def once(client: paflight.FlightClient) -> Any:
            [result] = client.do_action(action, paflight.FlightCallOptions(timeout=CALL_S))
            return msgspec.json.decode(result.body.to_pybytes())

        return self._connection.repeat(name, once, retry=retry)


class Registrar:
    """One DoPut to the coordinator, opened by the first stub. For one thread."""

    def __init__(self, connection: Connection, command: RegisterCommand) -> None:
        self.command = command
        self._where = f"register in {command.table}"
        self._connection = connection
        self._stream: tuple[Any, Any] | None = None
        self._schema: pa.Schema | None = None

    def register(self, stub: pa.RecordBatch, first: int, num_bytes: int) -> Registered:
        """Register the rows of a stub.

        Raises:
            FlightQueueError: the coordinator refuses them, or does not answer; then it may or may not have them.
        """
        if self._schema is not None and not stub.schema.equals(self._schema):
            self.close()  # The table was changed meanwhile, and with it what its stubs hold.
        note = m.encode(StubNote(first=first, num_bytes=num_bytes))

        def once(client: paflight.FlightClient) -> Registered:
            writer, reader = self._opened(client, stub.schema)
            try:
                writer.write_with_metadata(stub, note)
                data = reader.read()
                if data is None:
                    raise UnavailableError(
                        f"{self._where}: every stub must be answered, got the end of the stream"
                    )
            except BaseException:
                self._stream = None
                writer.close()  # What the coordinator has to say surfaces here.
                raise
            return m.decode(memoryview(data), Registered, what=self._where)

        return self._connection.repeat(self._where, once, retry=False)

    def close(self) -> None:
        """End the stream."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(pa.ArrowException, paflight.FlightError):
                stream[0].close()

    def _opened(self, client: paflight.FlightClient, schema: pa.Schema) -> tuple[Any, Any]:
        if self._stream is None:
            descriptor = paflight.FlightDescriptor.for_command(m.encode(self.command))
            self._stream = client.do_put(descriptor, schema, within(self.command.deadline_s))
            self._schema = schema
        return self._stream
