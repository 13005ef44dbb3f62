"""The client's side of a subscription: an iterator of leases that the server pushes as soon as there are rows.

A thread receives; what it holds for the caller is bounded by the credit. A lease counts from the moment that the
iterator hands it over: leases that wait for their turn are renewed with the heartbeats. Closing the subscription, or
the end of this process, gives every lease back that was not acked.

This is one stream; `flight.client.lasting` opens the next when it breaks.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.flight as paflight

from flight import messages as m
from flight import stream_messages as sm
from flight.client.connection import TRANSFER_S, Connection
from flight.client.open_stream import open_exchange, read_message
from flight.client.sharing import SharedMemory
from flight.errors import (
    BY_CODE,
    DeadlineExceededError,
    FlightQueueError,
    InvalidRequestError,
    LeaseLostError,
    UnavailableError,
)
from flight.shared.guest import Guest
from flight.shared.wire import BLOCK_GRANTS
from flight.state.ledger import TakeStatus

SILENT_BEATS = 3
"""Heartbeats that the server may miss."""

RENEW_AFTER = 0.1
"""Share of its time that a lease may wait for its turn before it is renewed."""

CLOSE_S = 5.0
"""Wait for the server's end of the stream before it is cancelled."""


class PushedLease:
    """Rows that the server pushed; like `flight.client.Lease`, with the verbs that finish it.

    status: "rows", or "outdated" without rows: adopt the newer `policy_version` (`Subscription.adopt`) to get more.
    """

    status: TakeStatus

    def __init__(
        self, subscription: Subscription, note: sm.Rows, table: pa.Table, status: TakeStatus = "rows"
    ) -> None:
        self.lease_id = note.lease_id
        self.table = table
        self.status = status
        self.policy_version = note.policy_version
        self.max_attempt = note.max_attempt
        self.max_staleness = note.max_staleness
        self.staleness_policy = note.staleness_policy
        self._came_s = time.monotonic()
        self._subscription = subscription
        self._rows_left = note.num_rows
        self._bytes_left = note.num_bytes

    def ack(self, *, uids: list[str] | None = None, step: int | None = None) -> int:
        """Finish the rows, or those of `uids`; returns how many were. Idempotent for the whole lease.

        Raises:
            LeaseLostError: it took longer than the lease lasted; the rows go to the next taker.
        """
        return self._finish(sm.AckRows(seq=0, lease_id=self.lease_id, uids=uids, step=step))

    def nack(self, reason: str, *, uids: list[str] | None = None, requeue: bool = True) -> int:
        """Give the rows back, to be delivered again, or with `requeue=False` skip them for good."""
        return self._finish(
            sm.NackRows(seq=0, lease_id=self.lease_id, reason=reason, uids=uids, requeue=requeue)
        )

    def renew(self, lease_s: float) -> None:
        """Let the lease last `lease_s` seconds from now."""
        self._subscription._ask(sm.RenewLease(seq=0, lease_id=self.lease_id, lease_s=lease_s))

    def _finish(self, message: sm.AckRows | sm.NackRows) -> int:
        if not self.table.num_rows:
            return 0
        # What is finished is granted anew with the same message: half of the rows free half of the bytes.
        with self._subscription._changed:
            num_rows = self._rows_left if message.uids is None else min(len(message.uids), self._rows_left)
            num_bytes = self._bytes_left * num_rows // max(self._rows_left, 1)
            self._rows_left -= num_rows
            self._bytes_left -= num_bytes
        message.credit = sm.Grant(rows=num_rows, bytes=num_bytes) if num_rows else None
        try:
            num_finished = self._subscription._ask(message)
        except LeaseLostError:
            self._subscription._let_go(self.lease_id, num_rows)
            if message.credit is not None:
                with suppress(UnavailableError):
                    self._subscription._write(message.credit)
            raise
        except FlightQueueError:
            with self._subscription._changed:
                self._rows_left += num_rows
                self._bytes_left += num_bytes
            raise
        self._subscription._let_go(self.lease_id, num_rows)
        return num_finished


class Subscription:
    """Leases as they come over one stream. Threads may share it; ends when the table does."""

    def __init__(
        self, connection: Connection, shared: SharedMemory, request: sm.Subscribe, *, idle_deadline_s: float
    ) -> None:
        self._where = f"subscription to {request.table} by {request.consumer}"
        self._request = request
        self._idle_deadline_s = idle_deadline_s
        self._waiting: deque[PushedLease] = deque()
        self._answers: dict[int, sm.Done | sm.Refused | None] = {}
        self._parts: list[pa.RecordBatch] = []
        self._changed = threading.Condition()
        self._write_lock = threading.Lock()
        self._seq = itertools.count(1)
        self._held: dict[str, int] = {}
        self._error: FlightQueueError | None = None
        self._is_sealed = False
        self._is_closed = False
        self._has_ended = False
        self._heard_s = time.monotonic()
        self._shared = shared
        self._guest: Guest | None = None
        self._next_grant = 0
        self._writer, self._reader, opened = connection.repeat(self._where, self._open, retry=False)
        self._silence_s = SILENT_BEATS * (opened.heartbeat_s or request.heartbeat_s) + TRANSFER_S
        self._receiver = threading.Thread(target=self._receive, name=self._where, daemon=True)
        self._receiver.start()

    def _open(self, client: paflight.FlightClient) -> tuple[Any, Any, sm.Opened]:
        self._guest = self._shared.seat(client)
        if self._guest is not None:
            self._next_grant = self._guest.new_block()
            self._request.shared = m.SharedRef(connection=self._guest.connection, grant=self._next_grant)
        return open_exchange(client, self._request, self._where)

    def next_lease(self, deadline_s: float | None = None) -> PushedLease | None:
        """Return the next lease, None if no row will ever come; waits up to `deadline_s` (`idle_deadline_s`).

        Raises:
            DeadlineExceededError: no rows came in time, or the server found this subscriber silent.
            UnavailableError: the server is gone, or silent.
        """
        deadline_s = self._idle_deadline_s if deadline_s is None else deadline_s
        self._wait(
            lambda: bool(self._waiting) or self._is_sealed or self._is_closed, deadline_s, self._nothing_came
        )
        with self._changed:
            if not self._waiting:
                return None
            lease = self._waiting.popleft()
            if lease.status == "rows":
                self._held[lease.lease_id] = lease.table.num_rows
        if lease.status == "rows" and time.monotonic() - lease._came_s > self._request.lease_s * RENEW_AFTER:
            # The lease counts from now, not from when it was pushed.
            self._write(sm.Heartbeat(renew=[lease.lease_id]))
        return lease

    @property
    def is_sealed(self) -> bool:
        """Return whether the server has said that no row will ever come."""
        return self._is_sealed

    def adopt(self, policy_version: int) -> None:
        """Say which policy version this subscriber generates from, or trains for, from now on."""
        self._write(sm.Adopt(policy_version=policy_version))

    def grant(self, *, rows: int = 0, num_bytes: int = 0) -> None:
        """Let the server push more than what acks and nacks grant anew by themselves."""
        self._write(sm.Grant(rows=rows, bytes=num_bytes))

    def close(self) -> None:
        """End the stream; leases that are not finished go back. Idempotent."""
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            self._waiting.clear()
            self._changed.notify_all()
        if was_closed:
            return
        with self._write_lock, suppress(pa.ArrowException, paflight.FlightError):
            self._writer.done_writing()
        self._receiver.join(CLOSE_S)
        if self._receiver.is_alive():
            self._reader.cancel()
            self._receiver.join(CLOSE_S)
        with suppress(pa.ArrowException, paflight.FlightError):
            self._writer.close()

    # ---- asking -----------------------------------------------------------------------------------------------

    def _ask(self, request: sm.AckRows | sm.NackRows | sm.RenewLease) -> int:
        """Send a message and return what the server did."""
        request.seq = next(self._seq)
        with self._changed:
            self._answers[request.seq] = None
        try:
            self._write(request)
            self._wait(
                lambda: self._answers[request.seq] is not None,
                TRANSFER_S,
                lambda: (
                    f"an answer to {type(request).__name__} of lease {request.lease_id!r} must come, got none"
                ),
            )
            answer = self._answers[request.seq]
        except UnavailableError as error:
            if self._error is None:  # closed by its owner
                raise
            raise LeaseLostError(
                f"{self._where}: the stream of lease {request.lease_id!r} must be open, got a broken one; its rows are "
                "delivered again"
            ) from error
        finally:
            with self._changed:
                del self._answers[request.seq]
        if not isinstance(answer, sm.Done):
            code, text = (answer.code, answer.message) if answer else ("internal", "no answer")
            raise BY_CODE.get(code, FlightQueueError)(text)
        return answer.num_rows

    def _let_go(self, lease_id: str, num_rows: int) -> None:
        """Note that rows of a lease are finished, or lost."""
        with self._changed:
            left = self._held.get(lease_id, 0) - num_rows
            if left > 0:
                self._held[lease_id] = left
            else:
                self._held.pop(lease_id, None)

    def _write(self, message: Any) -> None:
        try:
            with self._write_lock:
                self._writer.write_metadata(m.encode(message))
        except (pa.ArrowException, paflight.FlightError, OSError) as error:
            self._raise_if_over()
            raise self._lost(error) from error

    def _wait(self, is_done: Callable[[], bool], deadline_s: float, what: Callable[[], str]) -> None:
        """Wait for something that the receiver will note.

        Raises:
            DeadlineExceededError: it did not come; `what` says what is missing.
            UnavailableError: the server is gone, or silent.
        """
        deadline = time.monotonic() + deadline_s
        with self._changed:
            while not is_done():
                self._raise_if_over()
                now = time.monotonic()
                silent_at = self._heard_s + self._silence_s
                if now >= silent_at:
                    self._reader.cancel()
                    raise UnavailableError(
                        f"{self._where}: the server must say something every {self._silence_s:g} s, got nothing"
                    )
                if now >= deadline:
                    raise DeadlineExceededError(f"{self._where}: {what()}")
                self._changed.wait(min(deadline, silent_at) - now)

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closed or self._has_ended:
            raise UnavailableError(f"{self._where}: it must be open, got a closed one; subscribe again")

    def _nothing_came(self) -> str:
        return (
            f"rows must come within the deadline, got none; {sum(self._held.values())} rows in {len(self._held)} "
            f"leases wait for ack or nack here, the credit is {self._request.credit_rows} rows, "
            f"{self._request.credit_bytes} bytes"
        )

    # ---- receiving --------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        error: FlightQueueError | None = None
        try:
            while True:
                self._note(self._reader.read_chunk())
        except StopIteration:
            pass
        except FlightQueueError as problem:
            error = problem
        except (pa.ArrowException, paflight.FlightError, OSError) as problem:
            error = m.to_error(getattr(problem, "extra_info", None)) or self._lost(problem)
        with self._changed:
            self._has_ended = True
            self._waiting.clear()
            if self._guest is not None:
                # What was granted on its way here and has not arrived.
                block_end = (self._next_grant // BLOCK_GRANTS + 1) * BLOCK_GRANTS
                self._guest.free(self._next_grant, until=block_end)
            if self._error is None and not self._is_closed:
                self._error = error
            self._changed.notify_all()

    def _lost(self, problem: Exception) -> UnavailableError:
        return UnavailableError(
            f"{self._where}: its stream must stay open, got {type(problem).__name__}; its leases go back, "
            "subscribe again"
        )

    def _note(self, chunk: Any) -> None:
        message = read_message(chunk, sm.FromServer)
        with self._changed:
            self._heard_s = time.monotonic()
            if isinstance(message, sm.Rows):
                self._collect(message, chunk.data)
            elif isinstance(message, sm.Done | sm.Refused):
                if message.seq in self._answers:
                    self._answers[message.seq] = message
            elif isinstance(message, sm.Outdated):
                note = sm.Rows(lease_id="", num_rows=0, num_bytes=0, policy_version=message.policy_version)
                self._waiting.append(PushedLease(self, note, pa.table({}), "outdated"))
            elif isinstance(message, sm.Sealed):
                self._is_sealed = True
            elif isinstance(message, sm.Failed):
                self._error = BY_CODE.get(message.code, FlightQueueError)(message.message)
                self._waiting.clear()  # The server has taken these leases back.
            self._changed.notify_all()
            waiting = [lease.lease_id for lease in self._waiting] if isinstance(message, sm.Beat) else []
        if isinstance(message, sm.Beat) and not self._is_closed:
            self._write(sm.Heartbeat(renew=[lease_id for lease_id in waiting if lease_id]))

    def _collect(self, note: sm.Rows, batch: pa.RecordBatch | None) -> None:
        if note.shared is not None and self._guest is not None:
            self._next_grant = note.shared.grant + 1
            table = self._guest.rebuild(note.shared, self._reader.schema, None, note.shared.grant)
            if not self._is_closed:
                self._waiting.append(PushedLease(self, note, table))
            return
        if batch is None:
            raise InvalidRequestError(f"{self._where}: rows must come with a batch, got none")
        self._parts.append(batch)
        if note.part + 1 == note.num_parts:
            parts, self._parts = self._parts, []
            if not self._is_closed:
                self._waiting.append(PushedLease(self, note, pa.Table.from_batches(parts)))
