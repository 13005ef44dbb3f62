"""Takes over an open stream: no call and no schema for each of them, and the ack of the rows before rides along.

One take is one message each way, answered in the thread that asks. When the stream breaks, what was asked is asked
again on the next one: acks are idempotent, and rows of an answer that was lost come again when their lease expires.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import pyarrow as pa

from flight import messages as m
from flight import stream_messages as sm
from flight.client.open_stream import OpenStream
from flight.client.patience import waits
from flight.client.results import Lease
from flight.client.sharing import SharedMemory
from flight.errors import BY_CODE, FlightQueueError, InvalidRequestError, UnavailableError


def finished(
    lease: Lease | None, *, uids: Sequence[str] | None = None, step: int | None = None
) -> m.Finished | None:
    """Return what finishes a lease; None if there are no rows in it."""
    if lease is None or not lease.lease_id:
        return None
    return m.Finished(lease_id=lease.lease_id, uids=None if uids is None else list(uids), step=step)


class TakeStream:
    """Rows of one consumer, asked for; use it in a `with` block. Threads may share it, but then wait on each other.

    Made by `QueueClient.open_take`. Leases are the consumer's: they outlive the stream, and one that is not finished
    expires. To have rows pushed instead, see `QueueClient.subscribe`.
    """

    def __init__(
        self, stream: OpenStream, shared: SharedMemory, request: sm.TakeStream, *, deadline_s: float
    ) -> None:
        self._stream = stream
        self._shared = shared
        self._where = f"take from {request.table}"
        self._deadline_s = deadline_s
        self._seq = 0
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def take(
        self,
        *,
        max_rows: int,
        min_rows: int = 1,
        policy_version: int | None = None,
        lease_s: float = 60.0,
        deadline_s: float | None = None,
        ack: Lease | None = None,
        step: int | None = None,
    ) -> Lease:
        """Lease rows, after finishing those of `ack`, which `step` used; the rest is as in `QueueClient.take`."""
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        request = sm.TakeRows(
            seq=0,
            max_rows=max_rows,
            min_rows=min_rows,
            policy_version=policy_version,
            lease_s=lease_s,
            deadline_s=deadline_s,
            ack=finished(ack, step=step),
        )
        lease: Lease = self._ask(lambda: self._take_once(request), deadline_s)
        return lease

    def ack(self, lease: Lease, *, uids: Sequence[str] | None = None, step: int | None = None) -> int:
        """Finish the rows of a lease, or those of `uids`; returns how many were. Idempotent for the whole lease.

        Raises:
            LeaseLostError: it took longer than the lease lasted; the rows go to the next taker.
        """
        chosen = None if uids is None else list(uids)
        return self._finish(sm.AckRows(seq=0, lease_id=lease.lease_id, uids=chosen, step=step))

    def nack(
        self, lease: Lease, reason: str, *, uids: Sequence[str] | None = None, requeue: bool = True
    ) -> int:
        """Give the rows back, to be delivered again, or with `requeue=False` skip them for good."""
        chosen = None if uids is None else list(uids)
        return self._finish(
            sm.NackRows(seq=0, lease_id=lease.lease_id, reason=reason, uids=chosen, requeue=requeue)
        )

    def renew(self, lease: Lease, lease_s: float) -> None:
        """Let a live lease last `lease_s` seconds from now."""
        self._finish(sm.RenewLease(seq=0, lease_id=lease.lease_id, lease_s=lease_s))

    def close(self) -> None:
        """End the stream; leases stay until they are finished otherwise or expire. Idempotent."""
        with self._stream.held(self._deadline_s):
            self._is_closed = True
            self._stream.close()

    # ---- asking -----------------------------------------------------------------------------------------------

    def _ask(self, once: Callable[[], Any], deadline_s: float) -> Any:
        with self._stream.held(deadline_s):
            if self._is_closed:
                raise InvalidRequestError(
                    f"{self._where}: the stream must be open, got a closed one; open another"
                )
            tries = waits(self._stream.patience_s)
            while True:
                try:
                    with self._stream.errors():
                        answer = once()
                    break
                except UnavailableError:
                    delay_s = next(tries, None)
                    if delay_s is None:
                        raise
                time.sleep(delay_s)
        if isinstance(answer, sm.Refused):
            raise BY_CODE.get(answer.code, FlightQueueError)(answer.message)
        return answer

    def _finish(self, message: sm.AckRows | sm.NackRows | sm.RenewLease) -> int:
        if not message.lease_id:
            return 0

        def once() -> Any:
            self._stream.open()
            message.seq = self._next_seq()
            self._stream.say(message, deadline_s=self._deadline_s)
            return self._hear(message.seq, self._deadline_s)[0]

        num_rows: int = self._ask(once, self._deadline_s).num_rows
        return num_rows

    def _take_once(self, request: sm.TakeRows) -> Lease | sm.Refused:
        client = self._stream.open()
        guest = self._shared.seat(client)
        request.seq = self._next_seq()
        request.shared = None
        if guest is not None:
            request.shared = m.SharedRef(connection=guest.connection, grant=guest.new_grant())
        try:
            self._stream.say(request, deadline_s=request.deadline_s)
            answer, batch = self._hear(request.seq, request.deadline_s)
            if isinstance(answer, sm.Refused):
                return answer
            if guest is not None and request.shared is not None and answer.shared is not None:
                schema = self._stream.read_schema()
                return _lease(answer, guest.rebuild(answer.shared, schema, None, request.shared.grant))
            batches = [] if batch is None else [batch]
            while len(batches) < answer.num_parts and batch is not None:
                _, batch = self._hear(request.seq, request.deadline_s)
                batches += [] if batch is None else [batch]
        except BaseException:
            if guest is not None and request.shared is not None:
                # The server may have granted what has not arrived here, or may do so yet.
                guest.free(request.shared.grant)
            raise
        return _lease(answer, pa.Table.from_batches(batches, self._stream.read_schema()))

    def _hear(self, seq: int, deadline_s: float) -> tuple[Any, pa.RecordBatch | None]:
        answer, batch = self._stream.hear(sm.ToTaker, deadline_s)
        if isinstance(answer, sm.Opened) or answer.seq != seq:
            raise FlightQueueError(
                f"{self._where}: answers must come in order, got {answer} for message {seq}"
            )
        return answer, batch

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq


def _lease(answer: sm.Taken, table: pa.Table) -> Lease:
    return Lease(
        lease_id=answer.lease_id,
        table=table,
        status=answer.status,
        policy_version=answer.policy_version,
        max_staleness=answer.max_staleness,
        staleness_policy=answer.staleness_policy,
    )
