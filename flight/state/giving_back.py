"""Rows that come back from a consumer: to be delivered again, skipped, or gone on with. Pure.

A prompt whose rows were begun and not finished may come back with the policy version that they were begun from; its
next ticket counts from it, so that the trainer knows how old they will be.
"""

from __future__ import annotations

from collections.abc import Sequence

from flight.errors import InvalidRequestError
from flight.staleness import StalenessGate
from flight.state.settlement import Settlement
from flight.table import TableState


class GivingBack(Settlement):
    """The verb that ends a lease without finishing its rows."""

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
        """Give rows back or skip them; see `TableState.nack`.

        `policy_version` says that what their tickets were for was begun from that version, and will be gone on with.

        Raises:
            InvalidRequestError: `policy_version` is given for rows that are skipped, not named, or have no tickets.
        """
        table = self.table(name)
        gate = None if policy_version is None else self._gate_of_begun(table, consumer, uids, requeue=requeue)
        num_rows = table.nack(consumer, lease_id, uids, reason=reason, requeue=requeue)
        self._settle(name)
        if gate is not None and policy_version is not None:
            for uid in uids or ():
                row = table.find(uid)
                if row is not None and row.pending & table.cursor(consumer).bit:
                    gate.begin(uid, policy_version)
        return num_rows

    def _gate_of_begun(
        self, table: TableState, consumer: str, uids: Sequence[str] | None, *, requeue: bool
    ) -> StalenessGate | None:
        if not requeue or uids is None or table.spec.ticket_consumer() != consumer:
            raise InvalidRequestError(
                f"nack of {table.spec.name} by {consumer}: policy_version must be of rows with tickets that are named "
                f"and given back, got requeue {requeue} and uids {uids}"
            )
        return self._gate_of_tickets(table)
