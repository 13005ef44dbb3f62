"""The tables of one server behind one lock: what waits, waits here. It knows no sockets and no Flight.

`flight.state.ledger` decides, `flight.data.store` holds the values, this module adds the lock, the clock and the
waiting. Data are
copied in before the lock is taken and gathered after it is released; under it there is index arithmetic only. A wait
ends when the table (or one tied to it by tickets) changes, a lease expires, the deadline passes or the caller is gone.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

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
from flight.data.batches import check_batch
from flight.data.referring import referring_in
from flight.data.store import held_bytes, retain
from flight.storage.stubs import Stub, check_stub
from flight.table import PutOutcome

__all__ = ["Broker", "ReadRequest", "TakeAnswer", "Wait"]


class Broker(BrokerTables, BrokerRoom, BrokerReading, BrokerPlans, BrokerPushing, BrokerDead, BrokerStorage):
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
            MissingReferencesError: rows refer to rows of another table that are not there.
        """
        spec = self.describe(name) if stub is None else self._stub_spec(name, stub)
        if stub is not None:
            check_stub(spec, batch, stub)
        checked = check_batch(spec, batch, self._schemas.fit(spec, batch.schema, writer))
        parts = {part: data if is_retained else retain(data) for part, data in checked.split(spec).items()}
        labels = {
            column: checked.data.column(column).to_pylist()
            for column in spec.label_columns()
            if column in checked.data.schema.names
        }
        referring = referring_in(spec, checked.data)
        with self._locked():
            table = self._wait_for_room(name, checked, sum(map(held_bytes, parts.values())), wait, stub)
            bits = {part: table.part_names.index(part) for part in parts} or {"": 0}
            mask = sum(1 << bit for bit in bits.values())
            references = self._ledger.references.admit(name, checked.uids, referring)
            outcome = self._ledger.put(
                name, checked.uids, checked.group_ids, mask, checked.versions, labels, now=self.clock()
            )
            self._ledger.references.note(name, outcome.row_ids, references)
            if stub is not None:
                note_added(self._owners, table, stub, parts, outcome)
            for part, data in parts.items():
                self._stores[name].add(bits[part], data, outcome.rows_with_new(1 << bits[part]))
            self._after(name)
            store = self._stores[name]
            chunks = store.overflow(table.spec.memory_bytes) if table.spec.spill else []
        self._move_to_disk(store, chunks)
        return outcome

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
            num_rows = self._ledger.ack(name, consumer, lease_id, uids)
            if step is not None:
                self._ledger.table(name).last_step[consumer] = step
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
    ) -> int:
        """Give rows back or skip them; see `TableState.nack`."""
        with self._locked():
            num_rows = self._ledger.nack(name, consumer, lease_id, uids, reason=reason, requeue=requeue)
            self._after(name)
            return num_rows

    def renew(self, name: str, consumer: str, lease_id: str, lease_s: float) -> None:
        """Let a live lease last `lease_s` from now."""
        with self._locked():
            self._ledger.table(name).cursor(consumer).renew(lease_id, self.clock() + lease_s)

    def seal(self, name: str, expected_rows: int | None) -> None:
        """Declare the end of a table; see `TableState.seal`."""
        with self._locked():
            self._ledger.table(name).seal(expected_rows)
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
