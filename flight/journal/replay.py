"""A broker whose tables are made from their history: a checkpoint first, then decision after decision.

It goes through the same verbs of the ledger as a live broker. A take names the rows that it leased; what a put made is
compared with what it made the first time, so that a history that does not belong together is found and not guessed at.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from flight import messages as m
from flight.broker import Broker, Incoming
from flight.data.batches import check_batch, fit_of
from flight.data.referring import referring_in
from flight.errors import FlightQueueError, JournalDamagedError
from flight.journal import records as r
from flight.journal.extents import Extent
from flight.journal.recording import RecordingLedger
from flight.state.plan_book import PlanOrder


class ReplayingBroker(Broker):
    """Nothing waits here and no time passes: times are those of the history."""

    def __init__(self, *, lease_prefix: str = "", is_lenient: bool = False, **options: Any) -> None:
        """Make a broker without tables. A lenient one goes on where decisions are missing, and counts those."""
        self._recording = RecordingLedger(lease_prefix=lease_prefix)
        super().__init__(ledger=self._recording, **options)
        self._lease_prefix = lease_prefix
        self.created: dict[str, int] = {}
        """The decision that created each table."""
        self.clock_offset_s: float | None = None
        """Wall time minus the clock of the times in the tables, seconds; None before the first server."""
        self.num_left_out = 0
        """Decisions that could not be made again, by a lenient broker."""
        self.is_lenient = is_lenient
        self._makers: dict[type[r.Decision], Callable[[Any], object]] = {
            r.Opened: self._open,
            r.TableAltered: self._alter,
            r.TableDropped: self._replay_drop,
            r.TableTruncated: lambda d: self._ledger.truncate(d.table),
            r.Taken: lambda d: self._recording.retake(d.table, d.lease, d.consumer, d.adopted_version),
            r.DroppedTooOld: lambda d: self._recording.drop_too_old(d.table, d.exit_version),
            r.Planned: self._replay_plan,
            r.Acked: lambda d: self._ledger.ack(d.table, d.consumer, d.lease_id, d.uids, d.step),
            r.Nacked: lambda d: self._ledger.nack(
                d.table,
                d.consumer,
                d.lease_id,
                d.uids,
                reason=d.reason,
                requeue=d.requeue,
                policy_version=d.policy_version,
            ),
            r.Renewed: lambda d: self._ledger.renew(d.table, d.consumer, d.lease_id, d.deadline),
            r.Sealed: lambda d: self._ledger.seal(d.table, d.expected_rows),
            r.Announced: lambda d: self._ledger.announce(d.table, d.policy_version),
            r.BoundChanged: lambda d: self._ledger.set_max_staleness(d.table, d.max_staleness),
            r.Requeued: lambda d: self._ledger.requeue(
                d.table, d.consumer, None if d.uids is None else set(d.uids)
            ),
            r.Expired: self._expire,
            r.DeadDiscarded: lambda d: self._ledger.discard_oldest_dead(d.table),
        }

    @property
    def ledger(self) -> RecordingLedger:
        """Return the state of all tables; whoever uses it makes sure that nobody else does."""
        return self._recording

    # ---- a checkpoint -----------------------------------------------------------------------------------------

    def restore_tables(self, records: Sequence[r.TableRecord]) -> None:
        """Add tables as they were, still without values."""
        for record in records:
            first, *later = [m.to_spec(each) for each in record.definitions]
            self._ledger.create(first)
            for spec in later:
                self._ledger.redefine(spec)
            self._add_store(first.name)
            self.created[first.name] = record.created
        # Once all are there: what refers to what is known from then on.
        for record in records:
            name = record.definitions[-1].table
            self._ledger.table(name).restore(record.state)
            if record.state.is_referred_to:
                self._ledger.references.expect(name)
            if record.gate is not None:
                self._ledger.gate(name).restore(record.gate)

    def restore_rows(self, name: str, extent: Extent, batch: pa.RecordBatch) -> None:
        """Give rows of a checkpoint their values."""
        table = self._ledger.table(name)
        checked = check_batch(table.spec, batch, fit_of(table.spec, batch.schema.names, extent.put.writers))
        new_parts = extent.new_parts()
        for part, data in checked.split(table.spec).items():
            bit = table.part_names.index(part)
            row_ids = np.where(new_parts & (1 << bit), extent.row_ids, -1).tolist()
            self._stores[name].add(bit, data, row_ids)
            self._ledger.references.restore(name, row_ids, referring_in(table.spec, data))
        self._spill_over(name)

    # ---- another state ----------------------------------------------------------------------------------------

    def empty_twin(self, prefix: str) -> ReplayingBroker:
        """Return a broker without tables for this one to become; its leases have other names than any here."""
        return ReplayingBroker(
            lease_prefix=f"{self._lease_prefix}{prefix}",
            is_lenient=self.is_lenient,
            clock=self.clock,
            spill=self._spill,
        )

    def become(self, other: ReplayingBroker, now: float) -> None:
        """Have the tables of another broker, which nobody uses any more, instead of one's own.

        Leases are void and row numbers go on; who waits looks again, or learns that his table is gone.
        """
        with self._lock:
            behind_s = (other.clock_offset_s or 0.0) - (self.clock_offset_s or 0.0)
            for name, table in other.ledger.tables.items():
                table.shift_times(behind_s)
                table.renew_grace(now)
                if name in self._ledger.tables:
                    table.next_row_id = max(table.next_row_id, self._ledger.tables[name].next_row_id)
            other.void_leases()
            other.ledger.say = self._recording.say
            self._ledger = self._recording = other.ledger
            self._stores, self.created = other._stores, other.created
            for name in other._stores:
                self._changed.setdefault(name, threading.Condition(self._lock))
            self._notify(list(self._changed))
            self._changed = {name: self._changed[name] for name in other._stores}

    # ---- decisions --------------------------------------------------------------------------------------------

    def replay(self, seq: int, decision: r.Decision, batch: pa.RecordBatch | None = None) -> None:
        """Make a decision again; `batch` are the rows of a put.

        Raises:
            JournalDamagedError: it cannot have been made in this state.
        """
        try:
            with self._lock:
                self._make_again(seq, decision, batch)
        except (FlightQueueError, KeyError) as error:
            if not self.is_lenient:
                raise JournalDamagedError(
                    f"journal: decision {seq} ({decision.__struct_config__.tag}) must fit what was before it, "
                    f"got: {error}; run python -m flight fsck on the directory"
                ) from error
            self.num_left_out += 1

    def _make_again(self, seq: int, decision: r.Decision, batch: pa.RecordBatch | None) -> None:
        if isinstance(decision, r.TableCreated):
            spec = m.to_spec(decision.definition)
            if self._ledger.create(spec):
                self._add_store(spec.name)
                self.created[spec.name] = seq
        elif isinstance(decision, r.Put):
            self._replay_put(seq, decision, batch)
        else:
            self._makers[type(decision)](decision)
            name = getattr(decision, "table", None)
            if name is not None and name in self._ledger.tables:
                self._after(name)

    def void_leases(self) -> int:
        """End all leases, for their holders are gone; return how many tables had some."""
        with self._lock:
            voided = self._recording.void_leases()
            for name in voided:
                self._after(name)
        return len(voided)

    def retract_rows_without_values(self) -> dict[str, int]:
        """Remove rows of which values are lost, so that they can be put again; return how many by table."""
        lost = {}
        with self._lock:
            for name, table in self._ledger.tables.items():
                row_ids = list(table.rows)
                writers = {column.writer for column in table.spec.columns}
                torn = set()
                for part, writer in enumerate(table.part_names):
                    there = iter(row_ids)
                    for run in self._stores[name].locate(part, row_ids) if writer in writers else ():
                        some = list(islice(there, len(run.indices)))
                        if run.batch is None:
                            torn |= {row_id for row_id in some if table.rows[row_id].parts & (1 << part)}
                if torn:
                    lost[name] = len(torn)
                    self._recording.retract(name, sorted(torn))
                    self._after(name)
            while dangling := self._ledger.references.dangling():
                for name, row_ids in dangling.items():
                    lost[name] = lost.get(name, 0) + len(row_ids)
                    self._recording.retract(name, row_ids)
                    self._after(name)
        return lost

    def _open(self, decision: r.Opened) -> None:
        self.void_leases()
        if self.clock_offset_s is not None:
            for table in self._ledger.tables.values():
                table.shift_times(self.clock_offset_s - decision.clock_offset_s)
                table.renew_grace(decision.now)
        self.clock_offset_s = decision.clock_offset_s

    def _replay_put(self, seq: int, put: r.Put, batch: pa.RecordBatch | None) -> None:
        table = self._ledger.table(put.table)
        if batch is None:
            raise JournalDamagedError(f"journal: put {seq} must have rows, got none")
        row_ids = np.frombuffer(put.row_ids, np.int64)
        checked = check_batch(table.spec, batch, fit_of(table.spec, batch.schema.names, put.writers))
        if self.is_lenient:
            known = zip(row_ids.tolist(), checked.uids, strict=True)
            table.skip_row_ids(min((row_id for row_id, uid in known if table.num_new([uid])), default=0))
        outcome = self._add_rows(
            put.table, Incoming.of(table.spec, checked, checked.split(table.spec)), put.now
        )
        if outcome.row_ids != row_ids.tolist() and not self.is_lenient:
            raise JournalDamagedError(
                f"journal: put {seq} into {put.table} must make rows {_short(row_ids.tolist())}, "
                f"got {_short(outcome.row_ids)}"
            )
        self._spill_over(put.table)

    def _spill_over(self, name: str) -> None:
        spec = self._ledger.table(name).spec
        if spec.spill and self._spill is not None:
            self._move_to_disk(self._stores[name], self._stores[name].overflow(spec.memory_bytes))

    def _alter(self, decision: r.TableAltered) -> None:
        columns = m.columns_from(f"alter {decision.table}", decision.arrow_schema)
        self._ledger.alter(decision.table, columns, decision.consumers)
        self._widen_store(decision.table)

    def _replay_drop(self, decision: r.TableDropped) -> None:
        self._drop(decision.table)
        self.created.pop(decision.table, None)

    def _replay_plan(self, decision: r.Planned) -> None:
        table = self._ledger.table(decision.table)
        order = msgspec.convert(decision.order, PlanOrder)
        lease = table.cursor(order.consumer).find(decision.lease_id)
        self._ledger.plan(decision.table, order, lease, decision.sizes)

    def _expire(self, decision: r.Expired) -> None:
        for name in self._ledger.expire(decision.now):
            self._after(name)


def standing_broker(*, is_lenient: bool = False) -> ReplayingBroker:
    """Return a broker for files that nobody serves: no time passes, so that nothing in it grows old or expires."""
    return ReplayingBroker(clock=lambda: -math.inf, is_lenient=is_lenient)


def _short(row_ids: Sequence[int]) -> str:
    return str(list(row_ids)) if len(row_ids) <= 8 else f"{row_ids[0]} to {row_ids[-1]} ({len(row_ids)} rows)"
