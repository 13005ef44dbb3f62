"""Puts and takes over an open stream: no call, no schema and no change of thread for each of them.

The thread that gRPC lent for the DoExchange reads a message, does it, and answers it, one after the other; so answers
come in the order of what was said, and a put that waits for room makes what is behind it wait too. What cannot be done
is answered on the stream (`Refused`), which goes on; a message that is none ends it. Leases are the consumer's and not
the stream's: they outlive it, and are finished on the next one or expire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.flight as paflight

from flight import messages as m
from flight import stream_messages as sm
from flight.broker import Broker, TakeAnswer, Wait
from flight.data.sending import size_of, to_send
from flight.errors import FlightQueueError, InvalidRequestError, UnavailableError
from flight.server.finishing import check_lease, finish
from flight.server.guard import next_chunk
from flight.server.idle import PutWatch
from flight.server.putting import add_batch
from flight.shared.host import SharedMemoryHost
from flight.shared.wire import SMALL_BYTES
from flight.state.ledger import TakeRequest

Waits = Callable[[float], Wait]
"""Returns how long to wait, given a deadline in seconds."""

Reader: TypeAlias = paflight.MetadataRecordBatchReader
Writer: TypeAlias = paflight.MetadataRecordBatchWriter


class PutStreamSession:
    """Answers each put of one stream."""

    def __init__(
        self, broker: Broker, host: SharedMemoryHost | None, request: sm.PutStream, waits: Waits
    ) -> None:
        self._broker = broker
        self._host = host
        self._request = request
        self._waits = waits
        broker.describe(request.table)

    def serve(self, reader: Reader, writer: Writer, watch: PutWatch, peer: str) -> None:
        """Answer until the client closes the stream.

        Raises:
            OverloadedError: too many puts are open.
        """
        with watch.open(peer) as idle:
            writer.write_metadata(opened(watch))
            while (chunk := next_chunk(reader, idle)) is not None:
                message = read_message(chunk, sm.PutRows, "put stream")
                writer.write_metadata(m.encode(self.answer(message, chunk.data)))

    def answer(self, message: sm.PutRows, batch: pa.RecordBatch | None) -> sm.Added | sm.Refused:
        """Put what came, or say why not.

        Raises:
            UnavailableError: the server stops.
        """
        try:
            return self._put(message, batch)
        except UnavailableError:
            raise
        except FlightQueueError as error:
            return refused(message.seq, error)

    def _put(self, message: sm.PutRows, batch: pa.RecordBatch | None) -> sm.Added:
        request, shared = self._request, message.shared
        if (batch is None) == (shared is None):
            raise InvalidRequestError(
                f"put into {request.table}: message must have either a batch or shared, got "
                f"{'neither' if batch is None else 'both'}"
            )
        wait = self._waits(message.deadline_s)
        if batch is not None:
            put = m.PutCommand(table=request.table, writer=request.writer)
            return added(message.seq, [add_batch(self._broker, put, batch, wait)])
        if self._host is None or shared is None:
            raise InvalidRequestError("put stream: the server must have shared memory, got one without")
        slots = m.PutShared(
            table=request.table, writer=request.writer, connection=shared.connection, slots=shared.slots
        )
        batches = self._host.adopt(shared.connection, shared.slots)
        return added(message.seq, [add_batch(self._broker, slots, each, wait) for each in batches])


class TakeStreamSession:
    """Answers each take, ack, nack and renewal of one stream."""

    def __init__(
        self,
        broker: Broker,
        host: SharedMemoryHost | None,
        request: sm.TakeStream,
        waits: Waits,
    ) -> None:
        self._broker = broker
        self._host = host
        self._request = request
        self._waits = waits
        self._delivery = broker.delivery(request.table, request.consumer, request.columns)

    def serve(self, reader: Reader, writer: Writer, watch: PutWatch, peer: str) -> None:
        """Answer until the client closes the stream."""
        with watch.watch(peer, "take stream") as idle:
            writer.begin(self._delivery.schema)
            writer.write_metadata(opened(watch))
            while (chunk := next_chunk(reader, idle)) is not None:
                if chunk.data is not None:
                    raise InvalidRequestError("take stream: messages must be metadata only, got a batch")
                for answer, batch in self.answer(read_message(chunk, sm.FromTaker, "take stream")):
                    if batch is None:
                        writer.write_metadata(m.encode(answer))
                    else:
                        writer.write_with_metadata(batch, m.encode(answer))

    def answer(self, message: Any) -> Iterable[tuple[Any, pa.RecordBatch | None]]:
        """Do what a message asks for; return what to say.

        Raises:
            UnavailableError: the server stops.
        """
        table, consumer = self._request.table, self._request.consumer
        try:
            if isinstance(message, sm.TakeRows):
                return self._take(message)
            num_rows = finish(self._broker, table, consumer, message)
            return [(sm.Done(seq=message.seq, num_rows=num_rows), None)]
        except UnavailableError:
            raise
        except FlightQueueError as error:
            return [(refused(message.seq, error), None)]

    def _take(self, message: sm.TakeRows) -> Iterable[tuple[Any, pa.RecordBatch | None]]:
        wait = self._waits(message.deadline_s)
        request = TakeRequest(
            consumer=self._request.consumer,
            max_rows=message.max_rows,
            min_rows=message.min_rows,
            policy_version=message.policy_version,
            lease_s=check_lease(message.lease_s),
            member=self._request.identity,
        )
        if message.ack is not None:
            finish(self._broker, self._request.table, self._request.consumer, message.ack)
        answer = self._broker.take(self._request.table, request, self._delivery.columns, wait)
        note = taken(message.seq, answer)
        if not note.num_rows:
            return [(note, None)]
        num_bytes = size_of(answer.table, SMALL_BYTES)
        if num_bytes >= SMALL_BYTES and message.shared is not None and self._host is not None:
            note.shared = self._host.place(answer.table, message.shared)
            if note.shared is not None:
                return [(note, None)]
        batches = to_send(answer.table, num_bytes)
        note.num_parts = len(batches)
        return _numbered(note, batches)


def _numbered(
    note: sm.Taken, batches: list[pa.RecordBatch]
) -> Iterable[tuple[sm.Taken, pa.RecordBatch | None]]:
    for part, batch in enumerate(batches):
        note.part = part
        yield note, batch


def opened(watch: PutWatch) -> bytes:
    """Return the first word of a stream whose client may be silent for as long as that of a put."""
    return m.encode(sm.Opened(v=m.PROTOCOL_VERSION, idle_s=watch.idle_s))


def taken(seq: int, answer: TakeAnswer) -> sm.Taken:
    """Return what a take found, without its rows."""
    return sm.Taken(
        seq=seq,
        status=answer.status,
        policy_version=answer.policy_version,
        lease_id=answer.lease_id,
        num_rows=answer.table.num_rows,
        max_staleness=answer.max_staleness,
        staleness_policy=answer.policy,
    )


def added(seq: int, acks: list[m.PutAck]) -> sm.Added:
    """Return one answer for the batches of a message."""
    return sm.Added(
        seq=seq,
        num_rows=sum(ack.num_rows for ack in acks),
        num_duplicates=sum(ack.num_duplicates for ack in acks),
        runs=to_runs([row_id for ack in acks for row_id in ack.row_ids]),
    )


def to_runs(row_ids: list[int]) -> list[tuple[int, int]]:
    """Return numbers as runs (first, how many) of consecutive ones: an answer must stay small, however many rows."""
    if row_ids and row_ids == list(range(row_ids[0], row_ids[0] + len(row_ids))):
        return [(row_ids[0], len(row_ids))]
    runs: list[tuple[int, int]] = []
    for row_id in row_ids:
        if runs and row_id == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((row_id, 1))
    return runs


def refused(seq: int, error: FlightQueueError) -> sm.Refused:
    """Return why something was not done."""
    text, _ = m.error_detail(error)
    return sm.Refused(seq=seq, code=error.code, message=text)


def read_message(chunk: paflight.FlightStreamChunk, kind: Any, what: str) -> Any:
    """Return the message that came with or without a batch.

    Raises:
        InvalidRequestError: there is none, or it is another.
    """
    data = chunk.app_metadata
    if data is None:
        raise InvalidRequestError(f"{what}: every batch must say what it is, got one without metadata")
    return m.decode(memoryview(data), kind, what=f"{what} message")
