"""Puts over an open stream: no call and no schema for each of them, and as many on their way as the caller likes.

What has not been answered when a stream breaks is sent again on the next one, which is harmless: a uid that is there
already changes nothing, and counts as a duplicate then. Refused puts do not end the stream.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Self

import pyarrow as pa
import pyarrow.flight as paflight

from flight import stream_messages as sm
from flight.client.open_stream import OpenStream, read_message
from flight.client.patience import waits
from flight.client.results import PutResult
from flight.client.sharing import SharedMemory, Written
from flight.data.sending import size_of, to_send
from flight.errors import BY_CODE, FlightQueueError, InvalidRequestError, UnavailableError
from flight.shared.wire import SMALL_BYTES

MAX_UNANSWERED = 32
"""Messages on their way; more wait for answers first."""

MAX_UNANSWERED_ROWS = 2048
"""Rows on their way: answers that nobody reads must stay small, or both sides could wait on each other for ever."""

MAX_UNANSWERED_BYTES = 8 << 20


class PendingPut:
    """Rows on their way; `result` waits for what became of them."""

    def __init__(self, stream: PutStream, rows: pa.Table | pa.RecordBatch, deadline_s: float) -> None:
        self.rows = rows
        self.num_bytes = size_of(rows, SMALL_BYTES)
        self.deadline_s = deadline_s
        self.error: FlightQueueError | None = None
        self.is_done = False
        self._stream = stream
        self._answers: list[sm.Added] = []

    def result(self) -> PutResult:
        """Return what the put did; waits for it.

        Raises:
            DeadlineExceededError: no room came; the message says which consumer is behind.
            UnavailableError: no server answers.
            FlightQueueError: whatever else the server refuses, as `QueueClient.put`.
        """
        if not self.is_done:
            self._stream._finish(self)
        if self.error is not None:
            self._stream._told(self)
            raise self.error
        return PutResult(
            num_rows=sum(answer.num_rows for answer in self._answers),
            num_duplicates=sum(answer.num_duplicates for answer in self._answers),
            row_ids=tuple(
                row_id
                for answer in self._answers
                for first, count in answer.runs
                for row_id in range(first, first + count)
            ),
        )


class _Sent:
    """One message on its way: a put, or one batch of it. `written` says which slots of shared memory it holds."""

    __slots__ = ("is_last", "num_bytes", "num_rows", "put", "seq", "written")

    def __init__(
        self,
        put: PendingPut,
        seq: int,
        *,
        num_rows: int,
        num_bytes: int,
        is_last: bool,
        written: Written | None,
    ) -> None:
        self.put = put
        self.seq = seq
        self.num_rows = num_rows
        self.num_bytes = num_bytes
        self.is_last = is_last
        self.written = written


class PutStream:
    """Rows into one table; use it in a `with` block, whose end waits for all answers. Threads may share it.

    Made by `QueueClient.open_put`. Batches of another schema than those before make it open another stream.
    """

    def __init__(
        self, stream: OpenStream, shared: SharedMemory, request: sm.PutStream, *, deadline_s: float
    ) -> None:
        self._stream = stream
        self._stream.on_leftover = self._note_leftover
        self._shared = shared
        self._table = request.table
        self._deadline_s = deadline_s
        self._unsent: deque[PendingPut] = deque()
        self._sent: deque[_Sent] = deque()
        self._bytes_on_way = self._rows_on_way = 0
        self._untold: list[PendingPut] = []
        self._seq = 0
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def put(self, rows: pa.Table | pa.RecordBatch, *, deadline_s: float | None = None) -> PutResult:
        """Add rows, or parts of rows that exist; waits up to `deadline_s` for room. As `QueueClient.put`."""
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        put = PendingPut(self, rows, deadline_s)
        self._begin(put, until=put)
        return put.result()

    def put_nowait(self, rows: pa.Table | pa.RecordBatch, *, deadline_s: float | None = None) -> PendingPut:
        """Send rows and return at once, or when there are not too many on their way.

        What becomes of them is told by the `result` of what this returns, or by `flush`. The server puts in order, so
        that one put that waits for room makes those behind it wait; each has `deadline_s` from when its turn comes.
        """
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        put = PendingPut(self, rows, deadline_s)
        self._begin(put, until=None)
        return put

    def flush(self) -> None:
        """Wait until all puts are answered.

        Raises:
            FlightQueueError: the first refusal that no `result` has told of.
        """
        with self._stream.held(self._deadline_s):
            while self._sent or self._unsent:
                self._drive(self._unsent[-1] if self._unsent else self._sent[-1].put)
            untold, self._untold = self._untold, []
        if untold:
            raise untold[0].error or FlightQueueError(f"put into {self._table}: the put failed")

    def close(self) -> None:
        """End the stream; what is not answered stays so. Idempotent."""
        with self._stream.held(self._deadline_s):
            self._is_closed = True
            self._stream.close()
            closed = UnavailableError(f"put into {self._table}: the stream was closed before the answer")
            self._fail(closed)

    def _begin(self, put: PendingPut, *, until: PendingPut | None) -> None:
        """Send a put, and hear what became of `until`."""
        with self._stream.held(put.deadline_s):
            if self._is_closed:
                raise InvalidRequestError(
                    f"put into {self._table}: the stream must be open, got a closed one; open another"
                )
            self._unsent.append(put)
            self._drive(until)

    # ---- with the stream held ---------------------------------------------------------------------------------

    def _finish(self, put: PendingPut) -> None:
        with self._stream.held(put.deadline_s):
            self._drive(put)

    def _told(self, put: PendingPut) -> None:
        with self._stream.held(self._deadline_s):
            if put in self._untold:
                self._untold.remove(put)

    def _drive(self, until: PendingPut | None) -> None:
        """Send what is not sent, and read answers until `until` has all of its own; errors go to the puts."""
        tries = waits(self._stream.patience_s)
        if not self._stream.is_open:  # It broke while it was closed for a rest.
            self._take_back()
        while self._unsent or (until is not None and not until.is_done):
            num_left = len(self._sent) + len(self._unsent)
            try:
                with self._stream.errors():
                    client = self._stream.open()
                    while self._unsent:
                        self._send(client, self._unsent[0])
                        self._unsent.popleft()
                    while until is not None and not until.is_done:
                        self._hear()
                    return
            except UnavailableError as error:
                self._take_back()
                if len(self._unsent) < num_left:
                    tries = waits(self._stream.patience_s)
                delay_s = next(tries, None)
                if delay_s is None:
                    self._fail(error)
                    return
                time.sleep(delay_s)
            except FlightQueueError as error:
                self._take_back()
                self._fail(error)
                return

    def _send(self, client: paflight.FlightClient, put: PendingPut) -> None:
        put._answers, put.error = [], None
        self._make_room(put.rows.num_rows, put.num_bytes)
        if put.num_bytes >= SMALL_BYTES:
            written = self._shared.write(client, _table(put.rows))
            if written is not None:
                self._say(put, None, num_rows=put.rows.num_rows, num_bytes=put.num_bytes, written=written)
                return
        batches = to_send(put.rows, put.num_bytes)
        self._fit_schema(batches[0].schema)
        for number, batch in enumerate(batches, 1):
            num_bytes = put.num_bytes if len(batches) == 1 else batch.nbytes
            self._make_room(batch.num_rows, num_bytes)
            is_last = number == len(batches) or put.error is not None
            self._say(put, batch, num_rows=batch.num_rows, num_bytes=num_bytes, is_last=is_last)
            if is_last:
                return

    def _say(
        self,
        put: PendingPut,
        batch: pa.RecordBatch | None,
        *,
        num_rows: int,
        num_bytes: int,
        is_last: bool = True,
        written: Written | None = None,
    ) -> None:
        self._seq += 1
        sent = _Sent(put, self._seq, num_rows=num_rows, num_bytes=num_bytes, is_last=is_last, written=written)
        self._sent.append(sent)
        self._bytes_on_way += num_bytes
        self._rows_on_way += num_rows
        shared = None
        if written is not None:
            shared = sm.SharedSlots(connection=written.connection, slots=written.slots)
        message = sm.PutRows(seq=sent.seq, deadline_s=put.deadline_s, shared=shared)
        self._stream.say(message, batch, deadline_s=self._sent[0].put.deadline_s)

    def _make_room(self, num_rows: int, num_bytes: int) -> None:
        while self._sent and (
            len(self._sent) >= MAX_UNANSWERED
            or self._rows_on_way + num_rows > MAX_UNANSWERED_ROWS
            or self._bytes_on_way + num_bytes > MAX_UNANSWERED_BYTES
        ):
            self._hear()

    def _fit_schema(self, schema: pa.Schema) -> None:
        known = self._stream.schema
        if known is not None and known is not schema and not known.equals(schema):
            while self._sent:
                self._hear()
            self._stream.close()
            self._stream.open()

    def _hear(self) -> None:
        answer, _ = self._stream.hear(sm.ToPutter, self._sent[0].put.deadline_s)
        self._note(answer)

    def _note_leftover(self, chunk: paflight.FlightStreamChunk) -> None:
        if self._sent:
            self._note(read_message(chunk, sm.ToPutter))

    def _note(self, answer: sm.Opened | sm.Added | sm.Refused) -> None:
        sent = self._sent[0]
        if isinstance(answer, sm.Opened) or answer.seq != sent.seq:
            raise FlightQueueError(
                f"put into {self._table}: answers must come in order, got {answer} for message {sent.seq}"
            )
        self._forget(self._sent.popleft())
        put = sent.put
        if isinstance(answer, sm.Added):
            put._answers.append(answer)
        elif put.error is None:
            put.error = BY_CODE.get(answer.code, FlightQueueError)(answer.message)
        if sent.is_last:
            self._settle(put)

    def _settle(self, put: PendingPut) -> None:
        put.is_done = True
        put.rows = put.rows.slice(0, 0)
        if put.error is not None:
            self._untold.append(put)

    def _forget(self, sent: _Sent) -> None:
        self._bytes_on_way -= sent.num_bytes
        self._rows_on_way -= sent.num_rows
        if sent.written is not None:
            sent.written.free()

    def _take_back(self) -> None:
        """Put what is on its way back before what is not sent yet."""
        puts = dict.fromkeys([*(sent.put for sent in self._sent), *self._unsent])
        for sent in self._sent:
            self._forget(sent)
        self._sent.clear()
        self._unsent = deque(puts)

    def _fail(self, error: FlightQueueError) -> None:
        self._take_back()
        for put in self._unsent:
            put.error = error
            self._settle(put)
        self._unsent.clear()


def _table(rows: pa.Table | pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
