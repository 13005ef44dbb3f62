"""The tables of one server behind one lock: what waits, waits here. It knows no sockets and no Flight.

`flight.state.ledger` decides, `flight.data.store` holds the values, this module adds the lock, the clock and the
waiting. Data are
copied in before the lock is taken and gathered after it is released; under it there is index arithmetic only. A wait
ends when the table (or one tied to it by tickets) changes, a lease expires, the deadline passes or the caller is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from flight.broker.capturing import BrokerCapturing
from flight.broker.core import Wait
from flight.broker.dead import BrokerDead
from flight.broker.plans import BrokerPlans
from flight.broker.pushing import BrokerPushing
from flight.broker.reading import BrokerReading, ReadRequest
from flight.broker.remote import note_added
from flight.broker.room import BrokerRoom
from flight.broker.storage import BrokerStorage
from flight.broker.tables import BrokerTables
from flight.broker.taking import TakeAnswer
from flight.data.batches import CheckedBatch, check_batch, check_still_fits
from flight.data.referring import referring_in
from flight.data.store import held_bytes, retain
from flight.schema import TableSpec
from flight.state.references import Referring
from flight.storage.stubs import Stub, check_stub
from flight.table import PutOutcome

__all__ = ["Broker", "Incoming", "Logged", "ReadRequest", "TakeAnswer", "Wait"]


@dataclass(frozen=True, slots=True)
class Logged:
    """A put as a journal writes it down: `message` holds all columns, `writers` are whose parts came."""

    message: pa.Buffer
    schema: bytes
    writers: tuple[str, ...]
    outcome: PutOutcome
    now: float


@dataclass(frozen=True, slots=True)
class Incoming:
    """A batch that fits and what is found out about it before the lock is taken.

    parts: its values by writer, where they are kept. labels: the values that samplers look at, by column.
    """

    checked: CheckedBatch
    parts: Mapping[str, pa.RecordBatch]
    labels: Mapping[str, Sequence[Any]]
    referring: Sequence[Referring]

    @classmethod
    def of(cls, spec: TableSpec, checked: CheckedBatch, parts: Mapping[str, pa.RecordBatch]) -> Incoming:
        """Look at the columns that decide what happens to rows."""
        labels = {
            column: checked.data.column(column).to_pylist()
            for column in spec.label_columns()
            if column in checked.data.schema.names
        }
        return cls(checked, parts, labels, referring_in(spec, checked.data))


class Broker(
    BrokerTables,
    BrokerRoom,
    BrokerReading,
    BrokerPlans,
    BrokerPushing,
    BrokerDead,
    BrokerStorage,
    BrokerCapturing,
):
    """Thread-safe tables. All methods are short unless they take a `Wait`."""

    # ---- putting ----------------------------------------------------------------------------------------------

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
        """Add the rows of one batch, all or none; waits for room.

        The values are copied, unless they lie where they can stay (`is_retained`). With `stub`, the batch stands for
        values that a storage server has.

        Raises:
            SchemaMismatchError: the batch does not fit the table.
            DeadlineExceededError: no room came; the message says which consumer is behind.
            CapacityError: the batch alone is larger than the table may be.
            TableSealedError: there are new rows after the end.
            TableNotFoundError: there is none of that name, or not the one any more that there was when the put began.
            MissingReferencesError: rows refer to rows of another table that are not there.
        """
        spec = self.describe(name) if stub is None else self._stub_spec(name, stub)
        if stub is not None:
            check_stub(spec, batch, stub)
        checked = check_batch(spec, batch, self._schemas.fit(spec, batch.schema, writer))
        journaled = self._to_journal(batch)
        if journaled is not None and not is_retained:
            # What the journal wrote into one buffer is the copy that is kept.
            data = pa.ipc.read_record_batch(journaled[0], batch.schema).select(checked.data.schema.names)
            checked, is_retained = replace(checked, data=data), True
        parts = {part: data if is_retained else retain(data) for part, data in checked.split(spec).items()}
        incoming = Incoming.of(spec, checked, parts)
        with self._locked():
            table = self._wait_for_room(name, checked, sum(map(held_bytes, parts.values())), wait, stub)
            if stub is None and table.spec is not spec:
                check_still_fits(spec, table.spec, checked)
            now = self.clock()
            outcome = self._add_rows(name, incoming, now, stub)
            if journaled is not None:
                self._log_put(name, Logged(*journaled, tuple(parts), outcome, now))
            store = self._stores[name]
            chunks = store.overflow(table.spec.memory_bytes) if table.spec.spill else []
        self._move_to_disk(store, chunks)
        return outcome

    def _add_rows(self, name: str, incoming: Incoming, now: float, stub: Stub | None = None) -> PutOutcome:
        """Add rows for which there is room, and their values, if what they refer to is there."""
        table, checked, parts = self._ledger.table(name), incoming.checked, incoming.parts
        bits = {part: table.part_names.index(part) for part in parts} or {"": 0}
        mask = sum(1 << bit for bit in bits.values())
        references = self._ledger.references.admit(name, checked.uids, incoming.referring)
        outcome = self._ledger.put(
            name, checked.uids, checked.group_ids, mask, checked.versions, incoming.labels, now=now
        )
        self._ledger.references.note(name, outcome.row_ids, references)
        if stub is not None:
            note_added(self._owners, table, stub, parts, outcome)
        for part, data in parts.items():
            self._stores[name].add(bits[part], data, outcome.rows_with_new(1 << bits[part]))
        self._after(name)
        return outcome

    # ---- what a journal adds ----------------------------------------------------------------------------------

    def _to_journal(self, batch: pa.RecordBatch) -> tuple[pa.Buffer, bytes] | None:
        """Return the Arrow messages of a batch that fits and of its schema, None if nothing is written down."""
        return None

    def _log_put(self, name: str, put: Logged) -> None:
        """Write a put down; called after it under the same lock."""

    # ---- finishing --------------------------------------------------------------------------------------------

    def ack(
        self,
        name: str,
        consumer: str,
        lease_id: str | None,
        uids: Sequence[str] | None,
        step: int | None = None,
    ) -> int:
        """Finish rows; see `TableState.ack`. `step` is the optimizer step that used them, kept for the statistics."""
        with self._locked():
            num_rows = self._ledger.ack(name, consumer, lease_id, uids, step)
            self._after(name)
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
        """Give rows back or skip them; see `Ledger.nack`."""
        with self._locked():
            num_rows = self._ledger.nack(
                name, consumer, lease_id, uids, reason=reason, requeue=requeue, policy_version=policy_version
            )
            self._after(name)
            return num_rows

    def renew(self, name: str, consumer: str, lease_id: str, lease_s: float) -> None:
        """Let a live lease last `lease_s` from now."""
        with self._locked():
            self._ledger.renew(name, consumer, lease_id, self.clock() + lease_s)

    def seal(self, name: str, expected_rows: int | None) -> None:
        """Declare the end of a table; see `TableState.seal`."""
        with self._locked():
            self._ledger.seal(name, expected_rows)
            self._after(name)

    def announce(self, name: str, policy_version: int) -> None:
        """Announce a policy version; see `Ledger.announce`."""
        with self._locked():
            self._ledger.announce(name, policy_version)
            self._after(name)

    def set_max_staleness(self, name: str, max_staleness: int) -> None:
        """Change a staleness bound; see `Ledger.set_max_staleness`."""
        with self._locked():
            self._ledger.set_max_staleness(name, max_staleness)
            self._after(name)
