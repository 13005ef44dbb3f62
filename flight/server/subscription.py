"""The server's side of a subscription: leases pushed over one DoExchange stream, as far as its credit reaches.

Two threads serve a stream. The caller's thread reads what the subscriber says (nothing can end such a read but the
subscriber, so it must be the thread that gRPC lent), a second one takes rows and pushes them. The stream ends when the
subscriber closes it or is gone; leases that it has not finished go back then. A subscriber that says nothing for
`SILENT_BEATS` heartbeats is taken for dead: its leases go back at once, and if it does not close the stream its
connection is cut, which frees the reading thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as paflight
import structlog

from flight import messages as m
from flight import stream_messages as sm
from flight.broker import Broker, TakeAnswer, Wait
from flight.broker.pushing import Delivery
from flight.data.sending import to_send
from flight.errors import DeadlineExceededError, FlightQueueError, InvalidRequestError, LeaseLostError
from flight.server.admission import Caller
from flight.server.finishing import check_lease, finish
from flight.server.idle import cut_connection
from flight.server.open_streams import refused
from flight.shared.host import SharedMemoryHost
from flight.shared.layout import SharedTable
from flight.state.credit import Credit
from flight.state.ledger import TakeRequest

SILENT_BEATS = 3
MIN_HEARTBEAT_S = 0.1
MAX_HEARTBEAT_S = 60.0
MAX_OPEN_LEASES = 4096
"""Leases of one stream that may be unfinished; more are not pushed."""

MAX_RENEWALS = 4096

LOG = structlog.get_logger("flight.server.subscription")

Send = Callable[[bytes, pa.RecordBatch | None], None]
"""Writes one message, with or without a batch."""


def serve_subscription(
    broker: Broker,
    host: SharedMemoryHost | None,
    request: sm.Subscribe,
    reader: paflight.MetadataRecordBatchReader,
    writer: paflight.MetadataRecordBatchWriter,
    caller: Caller,
) -> None:
    """Serve a stream until its subscriber ends it, or may not have it any more.

    Raises:
        FlightQueueError: the subscription, or something said on it, cannot be.
    """
    _check(request)
    delivery = broker.delivery(request.table, request.consumer, request.columns)

    def send(metadata: bytes, batch: pa.RecordBatch | None) -> None:
        if batch is None:
            writer.write_metadata(metadata)
        else:
            writer.write_with_metadata(batch, metadata)

    session = Session(
        broker, request, delivery=delivery, send=send, is_cancelled=caller.is_cancelled, host=host
    )
    writer.begin(delivery.schema)
    session.open()
    peer = caller.peer()
    pusher = threading.Thread(
        target=session.push, args=(lambda: cut_connection(peer),), name=f"push-{request.table}", daemon=True
    )
    pusher.start()
    try:
        for chunk in reader:
            if chunk.data is not None:
                raise InvalidRequestError(
                    f"subscription to {request.table}: messages must be metadata only, got a batch"
                )
            if chunk.app_metadata is not None:
                session.hear(chunk.app_metadata.to_pybytes())
    finally:
        session.end()
        pusher.join()
        # What the pusher was just leasing when the stream ended.
        session.return_leases()


class Session:
    """What one subscriber holds and may get. `push` runs in one thread, all else in another."""

    def __init__(
        self,
        broker: Broker,
        request: sm.Subscribe,
        *,
        delivery: Delivery,
        send: Send,
        is_cancelled: Callable[[], bool],
        host: SharedMemoryHost | None = None,
    ) -> None:
        self._broker = broker
        self._host = host
        self._num_grants = 0
        self._request = request
        self._columns, unit_size = delivery.columns, delivery.unit_size
        self._where = f"subscription to {request.table} by {request.consumer}"
        self._at_least = -(-request.min_rows // unit_size) * unit_size
        self._credit = Credit(request.credit_rows, request.credit_bytes)
        if request.max_rows < self._at_least or 0 < (request.credit_rows or 0) < self._at_least:
            raise InvalidRequestError(
                f"{self._where}: max_rows and credit_rows must be at least {self._at_least}, min_rows in whole units "
                f"of {unit_size}, got {request.max_rows} and {request.credit_rows}"
            )
        self._send = send
        self._write_lock = threading.Lock()
        self._is_cancelled = is_cancelled
        self._changed = threading.Condition()
        self._policy_version = request.policy_version
        self._open: dict[str, None] = {}
        self._ended = False
        self._is_over = threading.Event()
        self._is_paused = False
        self._is_sealed = False
        self._heard_s = self._beat_s = broker.clock()

    # ---- what the subscriber says -----------------------------------------------------------------------------

    def open(self) -> None:
        """Tell the subscriber that the subscription stands."""
        self._say(sm.Opened(v=m.PROTOCOL_VERSION, heartbeat_s=self._request.heartbeat_s))

    def hear(self, data: bytes) -> None:
        """Do what a message asks for.

        Raises:
            InvalidRequestError: it is no message.
        """
        message: sm.FromSubscriber = m.decode(data, sm.FromSubscriber, what="subscription message")
        self._heard_s = self._broker.clock()
        if isinstance(message, sm.Grant):
            with self._changed:
                self._credit.grant(message.rows, message.bytes)
                self._changed.notify_all()
        elif isinstance(message, sm.Heartbeat):
            self._renew_waiting(message.renew)
        elif isinstance(message, sm.Adopt):
            with self._changed:
                self._policy_version = message.policy_version
                self._is_paused = False
                self._changed.notify_all()
            self._broker.wake(self._request.table)
        else:
            self._answer(message)

    def _answer(self, message: sm.AckRows | sm.NackRows | sm.RenewLease) -> None:
        try:
            num_rows = self._do(message)
        except FlightQueueError as error:
            self._say(refused(message.seq, error))
            if isinstance(error, LeaseLostError):
                self._close_lease(message.lease_id)
            return
        self._say(sm.Done(seq=message.seq, num_rows=num_rows))

    def _do(self, message: sm.AckRows | sm.NackRows | sm.RenewLease) -> int:
        num_rows = finish(self._broker, self._request.table, self._request.consumer, message)
        if isinstance(message, sm.RenewLease):
            return num_rows
        with self._changed:
            if message.uids is None:
                self._open.pop(message.lease_id, None)
            if message.credit is not None:
                self._credit.grant(message.credit.rows, message.credit.bytes)
            self._changed.notify_all()
        return num_rows

    def _renew_waiting(self, lease_ids: list[str]) -> None:
        for lease_id in lease_ids[:MAX_RENEWALS]:
            if lease_id in self._open:
                with suppress(LeaseLostError):  # The ack will say so.
                    self._broker.renew(
                        self._request.table, self._request.consumer, lease_id, self._request.lease_s
                    )

    def _close_lease(self, lease_id: str) -> None:
        with self._changed:
            self._open.pop(lease_id, None)
            self._changed.notify_all()

    def end(self) -> None:
        """Stop pushing and give back what the subscriber holds."""
        self._is_over.set()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._broker.wake(self._request.table)
        self.return_leases()

    def return_leases(self) -> None:
        """Give the unfinished leases back. Idempotent."""
        with self._changed:
            lease_ids, self._open = list(self._open), {}
        for lease_id in lease_ids:
            # Lost, closed by an action, or with its table: in each case nothing is left to give back.
            with suppress(FlightQueueError):
                self._broker.nack(
                    self._request.table,
                    self._request.consumer,
                    lease_id,
                    None,
                    reason=f"subscription of {self._request.identity!r} ended",
                    requeue=True,
                )

    # ---- what is pushed ---------------------------------------------------------------------------------------

    def push(self, cut: Callable[[], object]) -> None:
        """Push leases until the subscription ends; what goes wrong is told on the stream.

        A subscriber that does not close a stream that has failed is not there: `cut` ends its connection.
        """
        try:
            while not self._ended:
                self.step()
        except FlightQueueError as error:
            self._fail(error)
        except (pa.ArrowException, paflight.FlightError):
            self._fail(None)  # The stream is gone, and its reader will see that too.
        except Exception:
            LOG.exception("unexpected error", call=self._where)
            self._fail(FlightQueueError(f"{self._where}: the server failed, see its log"))
        if not self._is_over.wait(SILENT_BEATS * self._request.heartbeat_s):
            cut()

    def step(self) -> None:
        """Push one lease, or wait for a change of credit, version or table up to one heartbeat.

        Raises:
            DeadlineExceededError: the subscriber has been silent for too long.
        """
        if self._is_cancelled():
            self._ended = True
            return
        now = self._broker.clock()
        beat_s = self._request.heartbeat_s
        if now - self._heard_s > SILENT_BEATS * beat_s:
            raise DeadlineExceededError(
                f"{self._where}: its subscriber must say something every {SILENT_BEATS * beat_s:g} s, got nothing; "
                "its leases go to the next taker"
            )
        if now - self._beat_s >= beat_s:
            self._beat_s = now
            self._say(sm.Beat())
        with self._changed:
            most = self._credit.most_rows(self._request.max_rows, self._at_least)
            if not most or self._is_paused or self._is_sealed or len(self._open) >= MAX_OPEN_LEASES:
                if not self._ended:
                    self._changed.wait(beat_s)
                return
            version = self._policy_version
        take = TakeRequest(
            consumer=self._request.consumer,
            max_rows=most,
            min_rows=self._request.min_rows,
            policy_version=version,
            lease_s=self._request.lease_s,
            member=self._request.identity,
        )

        def is_gone() -> bool:
            return self._ended or self._policy_version != version or self._is_cancelled()

        try:
            wait = Wait(deadline=now + beat_s, is_gone=is_gone)
            answer = self._broker.take(self._request.table, take, self._columns, wait)
        except DeadlineExceededError:
            if self._is_cancelled():
                self._ended = True
            return
        self._deliver(answer)

    def _deliver(self, answer: TakeAnswer) -> None:
        if answer.status == "sealed":
            self._is_sealed = True
            self._say(sm.Sealed())
        elif answer.status == "outdated":
            with self._changed:
                asked = self._policy_version
                self._is_paused = asked is not None and asked < answer.policy_version
            self._say(sm.Outdated(policy_version=answer.policy_version))
        elif answer.status == "rows":
            with self._changed:
                self._open[answer.lease_id] = None
                self._credit.spend(answer.table.num_rows, answer.table.nbytes)
            note = sm.Rows(
                lease_id=answer.lease_id,
                num_rows=answer.table.num_rows,
                num_bytes=answer.table.nbytes,
                policy_version=answer.policy_version,
                max_staleness=answer.max_staleness,
                staleness_policy=answer.policy,
                max_attempt=max(answer.table.column("attempt").to_pylist()),
                shared=self._place(answer.table),
            )
            if note.shared is not None:
                self._say(note)
                return
            batches = to_send(answer.table, note.num_bytes)
            note.num_parts = len(batches)
            for part, batch in enumerate(batches):
                self._say(msgspec.structs.replace(note, part=part), batch)

    def _place(self, table: pa.Table) -> SharedTable | None:
        """Return where the rows of a lease lie if the subscriber can have them in shared memory."""
        wanted = self._request.shared
        if self._host is None or wanted is None:
            return None
        self._num_grants += 1
        grant = wanted.grant + self._num_grants - 1
        return self._host.place(table, m.SharedRef(connection=wanted.connection, grant=grant))

    def _fail(self, error: FlightQueueError | None) -> None:
        has_ended = self._ended
        self.return_leases()
        self._ended = True
        if error is not None and not has_ended:
            text, _ = m.error_detail(error)
            with suppress(pa.ArrowException, paflight.FlightError):
                self._say(sm.Failed(code=error.code, message=text))

    def _say(self, message: Any, batch: pa.RecordBatch | None = None) -> None:
        data = m.encode(message)
        with self._write_lock:
            self._send(data, batch)


def _check(request: sm.Subscribe) -> None:
    where = f"subscription to {request.table} by {request.consumer}"
    check_lease(request.lease_s)
    if not MIN_HEARTBEAT_S <= request.heartbeat_s <= MAX_HEARTBEAT_S:
        raise InvalidRequestError(
            f"{where}: heartbeat_s must be from {MIN_HEARTBEAT_S} to {MAX_HEARTBEAT_S:g}, got {request.heartbeat_s}"
        )
    if request.min_rows < 1 or request.max_rows < request.min_rows:
        raise InvalidRequestError(
            f"{where}: max_rows must be at least min_rows, which is at least 1, got max_rows {request.max_rows}, "
            f"min_rows {request.min_rows}"
        )
