"""A broker that forgets nothing: each change is acknowledged once it is as durable as its table asks.

What is handed out is durable first, too: nobody holds a row that a crash could undo.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pyarrow as pa

from flight.broker import TakeAnswer, Wait
from flight.broker.plans import PlanAnswer
from flight.errors import InvalidRequestError
from flight.journal.keeping import FLUSH_S, FRAME_BYTES
from flight.journal.pinning import PinningBroker
from flight.schema import Column, ConsumerSpec, TableSpec
from flight.state.ledger import TakeRequest
from flight.state.plan_book import PlanOrder
from flight.storage.stubs import Stub
from flight.table import PutOutcome


class JournaledBroker(PinningBroker):
    """Tables on disk. `close` must be called; the directory is locked until then."""

    def join(self, location: str, capacity_bytes: int | None) -> int:
        """Refuse storage servers: the journal would hold stubs whose values it does not have.

        Raises:
            InvalidRequestError: always.
        """
        raise InvalidRequestError(
            "storage_join: the coordinator must be one without a journal, got one with it; what storage servers hold "
            "is not journaled"
        )

    def put(
        self,
        name: str,
        batch: pa.RecordBatch,
        writer: str,
        wait: Wait,
        *,
        is_retained: bool = False,
        stub: Stub | None = None,
    ) -> PutOutcome:
        """See `Broker.put`; returns once the rows are as durable as the table asks.

        Raises:
            JournalFullError: the disk has no room; nothing is lost, the same put may be repeated.
        """
        with self._admitted(name, batch.nbytes + FRAME_BYTES, wait):
            outcome = super().put(name, batch, writer, wait, is_retained=is_retained, stub=stub)
            self._durable(name, max(wait.deadline - self.clock(), 0.0) + FLUSH_S)
        return outcome

    def take(
        self,
        name: str,
        request: TakeRequest,
        columns: Sequence[str] | None,
        wait: Wait,
        *,
        is_direct: bool = False,
    ) -> TakeAnswer:
        """See `Broker.take`."""
        answer = super().take(name, request, columns, wait, is_direct=is_direct)
        if answer.lease_id:
            self._durable(name, seq=self._last_put.get(name, 0))
        return answer

    def plan(self, name: str, order: PlanOrder, *, lease_s: float, member: str, wait: Wait) -> PlanAnswer:
        """See `Broker.plan`."""
        answer = super().plan(name, order, lease_s=lease_s, member=member, wait=wait)
        if answer.plan is not None:
            self._durable(name, seq=self._last_put.get(name, 0))
        return answer

    def ack(
        self,
        name: str,
        consumer: str,
        lease_id: str | None,
        uids: Sequence[str] | None,
        step: int | None = None,
    ) -> int:
        """See `Broker.ack`."""
        num_rows = super().ack(name, consumer, lease_id, uids, step)
        self._durable(name)
        return num_rows

    def nack(
        self,
        name: str,
        consumer: str,
        lease_id: str | None,
        uids: Sequence[str] | None,
        *,
        reason: str,
        requeue: bool,
        policy_version: int | None = None,
    ) -> int:
        """See `Broker.nack`."""
        num_rows = super().nack(
            name, consumer, lease_id, uids, reason=reason, requeue=requeue, policy_version=policy_version
        )
        self._durable(name)
        return num_rows

    def seal(self, name: str, expected_rows: int | None) -> None:
        """See `Broker.seal`."""
        super().seal(name, expected_rows)
        self._durable(name)

    def announce(self, name: str, policy_version: int) -> None:
        """See `Broker.announce`."""
        super().announce(name, policy_version)
        self._durable(name)

    def set_max_staleness(self, name: str, max_staleness: int) -> None:
        """See `Broker.set_max_staleness`."""
        super().set_max_staleness(name, max_staleness)
        self._durable(name)

    def requeue(self, name: str, consumer: str, uids: Collection[str] | None) -> int:
        """See `Broker.requeue`."""
        num_rows = super().requeue(name, consumer, uids)
        self._durable(name)
        return num_rows

    def create_table(self, spec: TableSpec, *, exist_ok: bool) -> None:
        """See `Broker.create_table`."""
        super().create_table(spec, exist_ok=exist_ok)
        self._durable(spec.name)

    def alter_table(
        self, name: str, columns: Sequence[Column], consumers: Sequence[ConsumerSpec]
    ) -> TableSpec:
        """See `Broker.alter_table`."""
        spec = super().alter_table(name, columns, consumers)
        self._durable(name)
        return spec

    def truncate_table(self, name: str) -> int:
        """See `Broker.truncate_table`."""
        num_rows = super().truncate_table(name)
        self._durable(name)
        return num_rows

    def drop_table(self, name: str) -> None:
        """See `Broker.drop_table`."""
        super().drop_table(name)
        self._durable(name)
