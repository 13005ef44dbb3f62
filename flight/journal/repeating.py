"""A ledger whose decisions can be made again as they were made: the verbs that only a history needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flight.state.leases import rows_of
from flight.state.ledger import Ledger
from flight.state.snapshots import LeaseSnapshot


class RepeatableLedger(Ledger):
    """What was decided by rows is repeated by rows, so that another release with another sampler repeats the same."""

    def retake(self, name: str, lease: LeaseSnapshot, consumer: str, adopted_version: int | None) -> None:
        """Lease the very rows that a take leased before, as far as they are ready; for a journal that is read back."""
        table = self.table(name)
        cursor = table.cursor(consumer)
        gate = self.gates.get(name)
        if gate is not None and gate.spec.consumer == consumer:
            self._drop_too_old(table, gate, lease.version)
        units = cursor.pick(lease.row_ids)
        if table.spec.ticket_consumer() == consumer and (entrance := self._gate_of_tickets(table)):
            for row in rows_of(units):
                entrance.issue(row.uid, self._charge(table, row.uid), adopted_version)
        if units:
            cursor.lease(
                units,
                member=lease.member,
                version=lease.version,
                deadline=lease.deadline,
                max_staleness=lease.max_staleness,
                lease_id=lease.lease_id,
            )

    def drop_too_old(self, name: str, exit_version: int) -> None:
        """Drop what is too old for a take that trains for `exit_version`."""
        self._drop_too_old(self.table(name), self.gate(name), exit_version)

    def retract(self, name: str, row_ids: Sequence[int]) -> None:
        """Remove rows for all consumers so that they can be put again."""
        table = self.table(name)
        table.remove([table.rows[row_id] for row_id in row_ids if row_id in table.rows], "retracted")
        self._settle(name)

    def void_leases(self) -> list[str]:
        """End all leases as if their time were over; return the tables concerned."""
        voided = [name for name, table in self.tables.items() if table.expire(math.inf)]
        for name in voided:
            self._settle(name)
        return voided
