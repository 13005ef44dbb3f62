"""A DoExchange stream that one caller at a time writes to and reads from in its own thread: no thread hop a message.

It opens when it is first used and again after a break, and rests (closes) when nobody has used it for a while, so that
an idle client costs the server nothing. Arrow Flight has no time limit for a read: `Watchdog` ends those that are late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pyarrow.flight as paflight

from flight import messages as m
from flight import stream_messages as sm
from flight.client.connection import TRANSFER_S, Connection
from flight.errors import DeadlineExceededError, FlightQueueError, InvalidRequestError, UnavailableError

MAX_STREAM_S = 86_400.0
"""A stream lives a day at most, then the next one is opened."""

LOOK_S = 1.0
"""How often late reads and idle streams are looked for."""

REST_S = 60.0
"""A stream that is not used for so long is closed; sooner if the server wants to hear more often."""


def open_exchange(
    client: paflight.FlightClient, request: m.Request, where: str
) -> tuple[Any, Any, sm.Opened]:
    """Open a stream and return its writer, its reader and the server's first word.

    Raises:
        UnavailableError: the server does not answer.
        InvalidRequestError: it speaks another version.
    """
    descriptor = paflight.FlightDescriptor.for_command(m.encode(request))
    writer, reader = client.do_exchange(descriptor, paflight.FlightCallOptions(timeout=MAX_STREAM_S))
    watchdog = threading.Timer(TRANSFER_S, reader.cancel)
    watchdog.daemon = True
    watchdog.start()
    try:
        chunk = reader.read_chunk()
    except StopIteration:
        raise UnavailableError(f"{where}: the server must open it, got the end of the stream") from None
    finally:
        watchdog.cancel()
    opened = read_message(chunk, sm.FromServer | sm.ToTaker | sm.ToPutter)
    if not isinstance(opened, sm.Opened) or opened.v != m.PROTOCOL_VERSION:
        version = opened.v if isinstance(opened, sm.Opened) else "another answer"
        reader.cancel()
        raise InvalidRequestError(
            f"{where}: protocol version of the server must be {m.PROTOCOL_VERSION}, got {version}; "
            "use a client of the server's release"
        )
    return writer, reader, opened


def read_message(chunk: paflight.FlightStreamChunk, kind: Any) -> Any:
    """Return the message that came with or without a batch.

    Raises:
        InvalidRequestError: there is none, or it is another.
    """
    data = chunk.app_metadata
    if data is None:
        raise InvalidRequestError("stream: every batch must say what it is, got one without metadata")
    return m.decode(memoryview(data), kind, what="stream message")


class OpenStream:
    """One stream at a time to one server. Its owner holds `lock` while using it."""

    def __init__(
        self,
        connection: Connection,
        request: m.Request,
        where: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.where = where
        self.schema: pa.Schema | None = None
        """Of the batches that were written, None before the first."""
        self._connection = connection
        self._request = request
        self._clock = clock
        self._lock = threading.RLock()
        self._read_schema: pa.Schema | None = None
        self._client: paflight.FlightClient | None = None
        self._writer: Any = None
        self._reader: Any = None
        self._rest_s = REST_S
        self._used_s = clock()
        self._late_at: float | None = None
        self._is_late = False
        self._watcher: threading.Thread | None = None
        self.on_leftover: Callable[[paflight.FlightStreamChunk], None] = lambda _: None
        """Gets what the server still said before a stream was closed in order."""

    @contextmanager
    def held(self, deadline_s: float) -> Iterator[None]:
        """Have the stream for this thread alone.

        Raises:
            DeadlineExceededError: another thread waits on it for longer.
        """
        if not self._lock.acquire(timeout=deadline_s + TRANSFER_S):
            raise DeadlineExceededError(
                f"{self.where}: the stream must be free within the deadline, got another thread waiting on it; "
                "open one a thread"
            )
        try:
            yield
        finally:
            self._used_s = self._clock()
            self._lock.release()

    @property
    def patience_s(self) -> float:
        """Return how long to try to reach a server that does not answer."""
        return self._connection.patience_s

    @property
    def is_open(self) -> bool:
        """Return whether a stream is open, as far as is known here."""
        return self._writer is not None

    # ---- with the lock ----------------------------------------------------------------------------------------

    def open(self) -> paflight.FlightClient:
        """Open the stream if it is not; return the client that it runs on."""
        if self._writer is None:
            self._client, exchange = self._connection.repeat(
                self.where,
                lambda client: (client, open_exchange(client, self._request, self.where)),
                retry=False,
            )
            self._writer, self._reader, opened = exchange
            self.schema = self._read_schema = None
            self._rest_s = min(REST_S, opened.idle_s / 2) if opened.idle_s is not None else REST_S
            self._watch()
        return self._client

    def say(self, message: Any, batch: pa.RecordBatch | None = None, *, deadline_s: float) -> None:
        """Write a message, with or without a batch; all batches of a stream have one schema.

        Blocks while the server does not read; it is late after the deadline and what a transfer may take.
        """
        self._late_at = self._clock() + deadline_s + TRANSFER_S
        if batch is None:
            self._writer.write_metadata(m.encode(message))
            return
        if self.schema is None:
            self._writer.begin(batch.schema)
            self.schema = batch.schema
        self._writer.write_with_metadata(batch, m.encode(message))

    def hear(self, kind: Any, deadline_s: float) -> tuple[Any, pa.RecordBatch | None]:
        """Read a message and the batch that comes with it; it is late as a write is.

        Raises:
            UnavailableError: the stream has ended.
        """
        self._late_at = self._clock() + deadline_s + TRANSFER_S
        try:
            chunk = self._reader.read_chunk()
        except StopIteration:
            raise UnavailableError(f"{self.where}: the stream must stay open, got its end") from None
        self._late_at = None
        return read_message(chunk, kind), chunk.data

    def read_schema(self) -> pa.Schema:
        """Return the schema of the batches that the server sends."""
        if self._read_schema is None:
            self._read_schema = self._reader.schema
        return self._read_schema

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn what goes wrong inside into our errors; the stream is given up then.

        Raises:
            DeadlineExceededError: the server was late.
            UnavailableError: the stream has broken.
            FlightQueueError: whatever the server ended it with.
        """
        try:
            with self._connection.errors(self.where):
                yield
        except FlightQueueError as error:
            is_late = self._is_late
            self.drop()
            if is_late:
                raise DeadlineExceededError(
                    f"{self.where}: the server must answer by the deadline, got nothing for {TRANSFER_S:g} s more"
                ) from error
            raise

    def drop(self) -> None:
        """Give up a stream that went wrong."""
        writer, reader, self._writer, self._reader = self._writer, self._reader, None, None
        self._late_at, self._is_late = None, False
        if reader is not None:
            reader.cancel()
            with suppress(pa.ArrowException, paflight.FlightError, OSError):
                writer.close()

    def close(self) -> None:
        """End the stream in order; the next use opens another."""
        writer, reader, self._writer, self._reader = self._writer, self._reader, None, None
        if writer is None:
            return
        late = threading.Timer(TRANSFER_S, reader.cancel)
        late.daemon = True
        late.start()
        with suppress(pa.ArrowException, paflight.FlightError, FlightQueueError, OSError):
            writer.done_writing()
            for chunk in reader:
                self.on_leftover(chunk)
        late.cancel()
        with suppress(pa.ArrowException, paflight.FlightError, OSError):
            writer.close()

    # ---- watching ---------------------------------------------------------------------------------------------

    def look(self) -> None:
        """End a read that is late; close a stream that is idle."""
        now, late_at, reader = self._clock(), self._late_at, self._reader
        if late_at is not None and now >= late_at and reader is not None:
            self._is_late = True
            reader.cancel()
        elif now - self._used_s >= self._rest_s and self._lock.acquire(blocking=False):
            try:
                if now - self._used_s >= self._rest_s:
                    self.close()
            finally:
                self._lock.release()

    def _watch(self) -> None:
        self._used_s = self._clock()
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch_on, name=f"watch {self.where}", daemon=True)
            self._watcher.start()

    def _watch_on(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(min(LOOK_S, self._rest_s / 4))
            self.look()
            # Whoever holds the lock may be the one whose read is late.
            if self._lock.acquire(blocking=False):
                try:
                    if self._writer is None:
                        self._watcher = None
                        return
                finally:
                    self._lock.release()
