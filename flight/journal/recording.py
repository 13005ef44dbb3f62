"""A ledger that says what it decided. It writes nothing itself, and puts are said by the broker, which has the rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec
import pyarrow as pa

from flight import messages as m
from flight.journal import records as r
from flight.journal.repeating import RepeatableLedger
from flight.schema import Column, ConsumerSpec, TableSpec
from flight.state.leases import Lease
from flight.state.ledger import Taken, TakeRequest
from flight.state.plan_book import Plan, PlanOrder


class RecordingLedger(RepeatableLedger):
    """Does what a `Ledger` does and tells `say` about every change; `say` is None while history is replayed."""

    def __init__(self, *, lease_prefix: str = "") -> None:
        super().__init__(lease_prefix=lease_prefix)
        self.say: Callable[[r.Decision], object] | None = None

    def _note(self, decision: r.Decision) -> None:
        if self.say is not None:
            self.say(decision)

    # ---- tables -----------------------------------------------------------------------------------------------

    def create(self, spec: TableSpec, *, exist_ok: bool = True) -> bool:
        """See `Catalogue.create`."""
        is_new = super().create(spec, exist_ok=exist_ok)
        if is_new:
            self._note(r.TableCreated(definition=m.from_spec(spec)))
        return is_new

    def alter(self, name: str, columns: Sequence[Column], consumers: Sequence[ConsumerSpec]) -> bool:
        """See `Ledger.alter`."""
        is_new = super().alter(name, columns, consumers)
        if is_new:
            schema = pa.schema([column.to_field() for column in columns]).serialize().to_pybytes()
            self._note(r.TableAltered(table=name, arrow_schema=schema, consumers=tuple(consumers)))
        return is_new

    def truncate(self, name: str) -> int:
        """See `Ledger.truncate`."""
        num_rows = super().truncate(name)
        self._note(r.TableTruncated(table=name))
        return num_rows

    def drop(self, name: str) -> list[str]:
        """See `Ledger.drop`."""
        targets = super().drop(name)
        self._note(r.TableDropped(table=name))
        return targets

    def seal(self, name: str, expected_rows: int | None) -> None:
        """See `Ledger.seal`."""
        super().seal(name, expected_rows)
        self._note(r.Sealed(table=name, expected_rows=expected_rows))

    def announce(self, name: str, policy_version: int) -> None:
        """See `Ledger.announce`."""
        super().announce(name, policy_version)
        self._note(r.Announced(table=name, policy_version=policy_version))

    def set_max_staleness(self, name: str, max_staleness: int) -> None:
        """See `Ledger.set_max_staleness`."""
        super().set_max_staleness(name, max_staleness)
        self._note(r.BoundChanged(table=name, max_staleness=max_staleness))

    # ---- rows -------------------------------------------------------------------------------------------------

    def take(self, name: str, request: TakeRequest, now: float) -> Taken | None:
        """See `Ledger.take`; what is said are the rows that were leased, and what was dropped on the way."""
        table = self.table(name)
        num_dropped = table.counts["dropped"]
        taken = super().take(name, request, now)
        if taken is not None and taken.lease is not None:
            self._note(
                r.Taken(
                    table=name,
                    consumer=request.consumer,
                    lease=taken.lease.capture(),
                    adopted_version=request.policy_version,
                )
            )
        elif table.counts["dropped"] != num_dropped:
            exit_version = self.gate(name).exit_version(request.policy_version)
            self._note(r.DroppedTooOld(table=name, exit_version=exit_version))
        return taken

    def plan(self, name: str, order: PlanOrder, lease: Lease, sizes: Sequence[int]) -> Plan:
        """See `Ledger.plan`."""
        plan = super().plan(name, order, lease, sizes)
        self._note(
            r.Planned(
                table=name, order=msgspec.to_builtins(order), lease_id=lease.lease_id, sizes=list(sizes)
            )
        )
        return plan

    def ack(
        self,
        name: str,
        consumer: str,
        lease_id: str | None,
        uids: Sequence[str] | None,
        step: int | None = None,
    ) -> int:
        """See `Ledger.ack`."""
        num_rows = super().ack(name, consumer, lease_id, uids, step)
        named = None if uids is None else list(uids)
        self._note(r.Acked(table=name, consumer=consumer, lease_id=lease_id, uids=named, step=step))
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
        """See `Ledger.nack`."""
        num_rows = super().nack(
            name, consumer, lease_id, uids, reason=reason, requeue=requeue, policy_version=policy_version
        )
        named = None if uids is None else list(uids)
        self._note(
            r.Nacked(
                table=name,
                consumer=consumer,
                reason=reason,
                requeue=requeue,
                lease_id=lease_id,
                uids=named,
                policy_version=policy_version,
            )
        )
        return num_rows

    def renew(self, name: str, consumer: str, lease_id: str, deadline: float) -> None:
        """See `Ledger.renew`."""
        super().renew(name, consumer, lease_id, deadline)
        self._note(r.Renewed(table=name, consumer=consumer, lease_id=lease_id, deadline=deadline))

    def requeue(self, name: str, consumer: str, uids: Collection[str] | None) -> int:
        """See `Ledger.requeue`."""
        num_rows = super().requeue(name, consumer, uids)
        if num_rows:
            named = None if uids is None else list(uids)
            self._note(r.Requeued(table=name, consumer=consumer, uids=named))
        return num_rows

    def discard_oldest_dead(self, name: str) -> bool:
        """See `Ledger.discard_oldest_dead`."""
        is_less = super().discard_oldest_dead(name)
        if is_less:
            self._note(r.DeadDiscarded(table=name))
        return is_less

    def expire(self, now: float) -> list[str]:
        """See `Ledger.expire`."""
        expired = super().expire(now)
        if expired:
            self._note(r.Expired(now=now))
        return expired
