"""All tables of one server and what they mean for one another. Pure: no sockets, locks, threads, clocks or data.

A table with tickets (prompts) is tied to the table that the tickets are for (rollouts): taking a row of the first is
the permit to put `rows_per_ticket` rows with `group_id` = its uid into the second, whose `StalenessGate` keeps the
books. A ticket ends with the lease of its row: put first, ack then.

    prompts:  take ------> ticket issued            rollouts:  put ------------> ticket used up, row outstanding
              ack -------> unused rest returned                ack by trainer -> trained, credited at next announce
              nack, expiry, dead, skipped -> returned          too old --------> dropped, its prompt released
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flight.errors import InvalidRequestError, TableNotFoundError
from flight.schema import Column, ConsumerSpec, TableSpec
from flight.staleness import StalenessGate
from flight.state.cursor import Cursor
from flight.state.evolution import evolve
from flight.state.giving_back import GivingBack
from flight.state.leases import Lease, Row, Unit
from flight.state.plan_book import Plan, PlanOrder
from flight.state.tally import Tally
from flight.table import PutOutcome, TableState

TakeStatus = Literal["rows", "empty", "sealed", "outdated"]


@dataclass(frozen=True, kw_only=True)
class TakeRequest:
    """What a consumer's member asks for. `policy_version` is what it generates from or trains for, if it said so."""

    consumer: str
    max_rows: int
    min_rows: int = 1
    policy_version: int | None = None
    lease_s: float = 60.0
    member: str = ""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The answer to a take: rows come with a lease, any other status without."""

    status: TakeStatus
    policy_version: int
    lease: Lease | None = None


class Ledger(GivingBack):
    """The verbs of rows, over tables that may be tied to one another. Not thread-safe."""

    def drop(self, name: str) -> list[str]:
        """Remove a table with all its rows, leases and tickets; return the tables of which rows went with them.

        Raises:
            InvalidRequestError: rows of another table refer to it.
        """
        table = self.table(name)
        self.references.check_unreferenced(name, "drop_table")
        gate = self._gate_of_tickets(table)
        if gate is not None:
            for lease in table.cursors[table.spec.ticket_consumer()].leases.values():
                for row in lease.rows():
                    gate.release(row.uid)
        del self.tables[name]
        self.gates.pop(name, None)
        return self.references.drop(name)

    def alter(self, name: str, columns: Sequence[Column], consumers: Sequence[ConsumerSpec]) -> bool:
        """Add nullable columns and consumers to a table in use; return whether anything is new.

        Raises:
            SchemaMismatchError: something that is there would change; all differences are named.
        """
        table = self.table(name)
        spec = evolve(table.spec, columns, consumers)
        if spec != table.spec:
            self.redefine(spec)
            self._skip_uniform(table)
            return True
        return False

    def redefine(self, spec: TableSpec) -> None:
        """Let a table be what `flight.state.evolution` made of it."""
        self.references.check_new(spec)
        self.table(spec.name).alter(spec)
        self.references.declare(spec)

    def truncate(self, name: str) -> int:
        """Remove all rows of a table: leases void, tickets returned, the end forgotten. Returns how many rows.

        Raises:
            InvalidRequestError: rows of another table refer to them.
        """
        self.references.check_unreferenced(name, "truncate_table")
        num_rows = self.table(name).truncate()
        self._settle(name)
        return num_rows

    def requeue(self, name: str, consumer: str, uids: Collection[str] | None) -> int:
        """Make dead letters ready again; see `TableState.requeue`."""
        num_rows = self.table(name).requeue(consumer, uids)
        self._settle(name)
        return num_rows

    # ---- verbs ------------------------------------------------------------------------------------------------

    def put(
        self,
        name: str,
        uids: Sequence[str],
        group_ids: Sequence[str],
        parts: int,
        versions: Sequence[int] | None,
        labels: Mapping[str, Sequence[Any]] | None = None,
        *,
        now: float = 0.0,
    ) -> PutOutcome:
        """Add rows or parts of rows; see `TableState.put`. The caller has made sure of the room."""
        table = self.table(name)
        outcome = table.put(uids, group_ids, parts, versions, labels, now=now)
        gate = self.gates.get(name)
        if gate is not None:
            for group_id, num_rows in Counter([row.group_id for row in outcome.arrived]).items():
                gate.arrive(group_id, num_rows)
        self._settle_arrivals(name, outcome.arrived)
        self._skip_uniform(table)
        return outcome

    def take(self, name: str, request: TakeRequest, now: float) -> Taken | None:
        """Lease rows; None means that the asker should wait for something to change.

        Raises:
            InvalidRequestError: the request can never be fulfilled.
        """
        table = self.table(name)
        cursor = table.cursor(request.consumer)
        self._check_take(table, cursor, request)
        gate = self.gates.get(name)
        exit_gate = gate if gate is not None and gate.spec.consumer == request.consumer else None
        entrance = self._gate_of_tickets(table) if table.spec.ticket_consumer() == request.consumer else None
        if exit_gate is not None:
            self._drop_too_old(table, exit_gate, exit_gate.exit_version(request.policy_version))
        if table.is_exhausted(cursor):
            return Taken(status="sealed", policy_version=self.policy_version(name))
        version = exit_gate.exit_version(request.policy_version) if exit_gate else 0
        units = self._select(table, cursor, request, entrance)
        if not units or (exit_gate is not None and self._should_wait(exit_gate, table, units, version)):
            cursor.push(units)
            adopted = request.policy_version
            if entrance is not None and adopted is not None and adopted < entrance.policy_version:
                return Taken(status="outdated", policy_version=entrance.policy_version)
            return None
        if entrance is not None:
            for unit in units:
                for row in unit.rows:
                    entrance.issue(row.uid, self._charge(table, row.uid), request.policy_version)
        lease = cursor.lease(
            units,
            member=request.member,
            version=version,
            deadline=now + request.lease_s,
            max_staleness=exit_gate.max_staleness if exit_gate is not None else None,
        )
        return Taken(status="rows", policy_version=self.policy_version(name), lease=lease)

    def plan(self, name: str, order: PlanOrder, lease: Lease, sizes: Sequence[int]) -> Plan:
        """Make the rows of a lease the plan of a step; see `PlanBook.add`."""
        return self.table(name).plans.add(order, lease, sizes)

    def ack(
        self,
        name: str,
        consumer: str,
        lease_id: str | None,
        uids: Sequence[str] | None,
        step: int | None = None,
    ) -> int:
        """Finish rows for a consumer; see `TableState.ack`. `step`, the optimizer step, is kept for the statistics."""
        num_rows = self.table(name).ack(consumer, lease_id, uids)
        if step is not None:
            self.table(name).last_step[consumer] = step
        self._settle(name)
        return num_rows

    def renew(self, name: str, consumer: str, lease_id: str, deadline: float) -> None:
        """Move a live lease's deadline."""
        self.table(name).cursor(consumer).renew(lease_id, deadline)

    def seal(self, name: str, expected_rows: int | None) -> None:
        """Declare the end of a table; see `TableState.seal`."""
        self.table(name).seal(expected_rows)

    def discard_oldest_dead(self, name: str) -> bool:
        """Let a dead letter make room; see `TableState.discard_oldest_dead`."""
        return self.table(name).discard_oldest_dead()

    def expire(self, now: float) -> list[str]:
        """End the leases whose deadline has passed and remove rows that are too old; return the tables concerned."""
        due = [(name, table) for name, table in self.tables.items() if table.is_due(now)]
        expired = [name for name, table in due if table.expire(now) + table.expire_old(now)]
        for name in expired:
            self._settle(name)
        return expired

    def next_expiry(self) -> float | None:
        """Return when the next lease may expire or the next row become too old, None if nothing can."""
        times = [
            time
            for table in self.tables.values()
            for time in (table.next_expiry(), table.next_age_check())
            if time is not None
        ]
        return min(times, default=None)

    def announce(self, name: str, policy_version: int) -> None:
        """Set the policy version of a table with a staleness bound and drop what has become too old."""
        gate = self.gate(name)
        gate.announce(policy_version)
        self._drop_too_old(self.table(name), gate, gate.policy_version)

    def set_max_staleness(self, name: str, max_staleness: int) -> None:
        """Change K; a smaller one drops what it makes too old."""
        gate = self.gate(name)
        self.table(name).spec.check_max_staleness(max_staleness)
        gate.max_staleness = max_staleness
        self._drop_too_old(self.table(name), gate, gate.policy_version)

    def lose(self, name: str, rows: Sequence[Row]) -> dict[str, int]:
        """Remove rows whose values are gone, and all that refer to them; return how many left, by table.

        See `TableState.lose`.
        """
        num_lost = Counter[str]()
        waiting = [(name, rows)]
        for each, gone in waiting:
            left = self.table(each).lose(gone)
            num_lost[each] += len(left)
            waiting += self.references.referring_to(each, [row.uid for row in left])
        for each in num_lost:
            self._settle(each)
        return num_lost

    # ---- taking -----------------------------------------------------------------------------------------------

    def _check_take(self, table: TableState, cursor: Cursor, request: TakeRequest) -> None:
        where = f"take from {table.spec.name} by {request.consumer}"
        whole = request.max_rows // cursor.unit_size * cursor.unit_size
        if request.min_rows < 1 or request.max_rows < request.min_rows or whole < request.min_rows:
            raise InvalidRequestError(
                f"{where}: max_rows must hold min_rows in whole units of {cursor.unit_size}, "
                f"got max_rows {request.max_rows}, min_rows {request.min_rows}"
            )
        if request.min_rows > table.spec.capacity_rows:
            raise InvalidRequestError(
                f"{where}: min_rows must be at most capacity_rows {table.spec.capacity_rows}, got {request.min_rows}"
            )
        if not request.lease_s > 0:
            raise InvalidRequestError(f"{where}: lease_s must be positive, got {request.lease_s}")
        tickets = table.spec.tickets
        if tickets is None or table.spec.ticket_consumer() != request.consumer:
            return
        if tickets.table not in self.tables:
            raise TableNotFoundError(
                f"{where}: the table that its tickets are for must exist, got {tickets.table!r}; create it first"
            )
        gate = self.gates.get(tickets.table)
        if gate is not None and request.min_rows * tickets.rows_per_ticket > gate.most_room():
            raise InvalidRequestError(
                f"{where}: min_rows must be at most {gate.most_room() // tickets.rows_per_ticket}, what max_staleness "
                f"{gate.max_staleness} lets into {tickets.table}, got {request.min_rows}"
            )

    def _select(
        self, table: TableState, cursor: Cursor, request: TakeRequest, entrance: StalenessGate | None
    ) -> list[Unit]:
        """Pop the oldest units that fit the request and the room at the entrance; none if they are too few."""
        min_rows = 1 if table.no_more_coming(cursor) else request.min_rows
        if cursor.num_ready() < min_rows:
            return []
        max_units = request.max_rows // cursor.unit_size
        if entrance is None:
            units = cursor.pop_many(max_units)
        else:
            units = self._pop_within(table, cursor, max_units, entrance.room(request.policy_version))
        if len(units) * cursor.unit_size < min_rows:
            cursor.push(units)
            return []
        return units

    def _pop_within(self, table: TableState, cursor: Cursor, max_units: int, room: int) -> list[Unit]:
        """Pop the oldest units whose tickets fit into the room at the entrance."""
        units: list[Unit] = []
        while len(units) < max_units and (unit := cursor.oldest()) is not None:
            room -= sum(self._charge(table, row.uid) for row in unit.rows)
            if room < 0:
                break
            units += filter(None, [cursor.pop()])
        return units

    def _charge(self, table: TableState, uid: str) -> int:
        """Return the rows that a ticket for `uid` adds: those of its group that are in the table count already."""
        if table.spec.tickets is None:
            return 0
        target = self.tables[table.spec.tickets.table]
        there = len(target.groups.rows_of(uid)) if target.groups else 0
        return max(0, table.spec.tickets.rows_per_ticket - there)

    def _should_wait(self, gate: StalenessGate, table: TableState, units: list[Unit], version: int) -> bool:
        cursor = table.cursors[gate.spec.consumer]
        if table.no_more_coming(cursor):
            return False
        batch = Tally([unit.version for unit in units for _ in unit.rows])
        num_taken = cursor.leased[version] + gate.trained[version]
        return gate.should_wait(batch, cursor.ready, cursor.unready, version, num_taken)

    def _skip_uniform(self, table: TableState) -> None:
        """Let groups go whose rows teach nothing; the entrance then has room for others."""
        for cursor in table.cursors.values():
            uniform, cursor.uniform = cursor.uniform, []
            for unit in uniform:
                table.remove(unit.rows, "uniform")
            if uniform:
                self._settle(table.spec.name)

    def _drop_too_old(self, table: TableState, gate: StalenessGate, exit_version: int) -> None:
        cursor = table.cursors[gate.spec.consumer]
        while (unit := cursor.oldest()) is not None and gate.must_drop(unit.version, exit_version):
            gate.dropped_age[exit_version - unit.version] += len(unit.rows)
            table.remove(unit.rows, "dropped")
        self._settle(table.spec.name)
