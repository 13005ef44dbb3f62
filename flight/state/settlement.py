"""What befalls the rows of one table is carried over to the tables tied to it, and to the gates. Pure.

See `flight.state.ledger` for what a ticket is; this module is the right-hand side of its picture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flight.state.catalogue import Catalogue
from flight.state.leases import Row
from flight.state.table_keeping import Event
from flight.table import TableState


class Settlement(Catalogue):
    """Reads the events that tables note and draws the consequences."""

    def _settle(self, name: str) -> None:
        """Carry what befell the rows of a table over to the gates and the tables tied to it."""
        table = self.tables[name]
        events, table.events = table.events, []
        for event in events:
            if name in self.gates:
                self._settle_exit(name, event)
            elif event.kind in ("uniform", "expired", "truncated", "lost"):
                self._release_prompts(name, event.rows)
            if table.spec.ticket_consumer() == event.consumer:
                self._settle_ticket(table, event)

    def _settle_exit(self, name: str, event: Event) -> None:
        gate = self.gates[name]
        if event.consumer != gate.spec.consumer or event.kind == "returned":
            return
        if event.kind == "acked":
            bound = gate.max_staleness if event.max_staleness is None else event.max_staleness
            for version, num_rows in Counter([row.version for row in event.rows]).items():
                gate.train(version, event.version, bound, num_rows)
            self.tables[name].measured += [
                ("stale" if event.version - row.version > bound else "trained", row) for row in event.rows
            ]
            return
        if event.kind == "requeued":
            gate.readmit(len(event.rows))
            return
        gate.withdraw(event.kind, len(event.rows))
        if event.kind != "retracted":
            self._release_prompts(name, event.rows)

    def _release_prompts(self, name: str, rows: Sequence[Row]) -> None:
        for source in self.sources_of(name):
            for row in rows:
                source.release(row.group_id)

    def _settle_ticket(self, table: TableState, event: Event) -> None:
        """End tickets with their lease; a group that is not whole by then goes with it.

        Once a row is finished, the rows that its tickets allowed and that have not come are not expected any more.
        """
        target = self.tables.get(table.spec.tickets.table) if table.spec.tickets else None
        if target is None or table.spec.tickets is None:
            return
        gate = self.gates.get(target.spec.name)
        for prompt in event.rows:
            if event.kind == "requeued":
                target.end.expect_again(prompt.uid)
                continue
            if gate is not None:
                gate.release(prompt.uid)
            self._clear_group(
                target, prompt.uid, can_come_again=event.kind in ("returned", "dead", "truncated", "lost")
            )
            if event.kind != "returned":
                if gate is not None:
                    gate.end(prompt.uid)
                target.end.miss(prompt.uid, table.spec.tickets.rows_per_ticket - prompt.num_made)

    def _clear_group(self, target: TableState, group_id: str, *, can_come_again: bool) -> None:
        """Remove the rows of a group that is not whole."""
        rest = target.groups.incomplete(group_id) if target.groups else []
        if not rest:
            return
        if can_come_again:
            for source in self.sources_of(target.spec.name):
                prompt = source.find(group_id)
                if prompt is not None:
                    prompt.num_made -= len(rest)
        target.remove(rest, "retracted" if can_come_again else "abandoned")
        self._settle(target.spec.name)

    def _settle_arrivals(self, name: str, rows: Sequence[Row]) -> None:
        """Count new rows at the prompts whose tickets allow them, and clear what came too late to become whole.

        A worker whose lease has expired may still put, and may die halfway: without a ticket whose end would clear
        it, half a group would hold room for ever.
        """
        target = self.tables[name]
        for source in self.sources_of(name):
            cursor = source.cursors[source.spec.ticket_consumer()]
            late: dict[str, Row | None] = {}
            for row in rows:
                prompt = source.find(row.group_id)
                if prompt is not None:
                    prompt.num_made += 1
                if prompt is not None and not cursor.is_leased(prompt):
                    late[row.group_id] = prompt
                elif prompt is None and source.find_retired(row.group_id) is not None:
                    late[row.group_id] = None
            for group_id, prompt in late.items():
                will_come = prompt is not None and bool(prompt.pending & cursor.bit)
                is_dead = prompt is not None and bool(prompt.dead & cursor.bit)
                num_rest = len(target.groups.incomplete(group_id)) if target.groups else 0
                self._clear_group(target, group_id, can_come_again=will_come or is_dead)
                if is_dead:
                    target.end.miss(group_id, num_rest)
