"""The freshness bound of one table, exact at both ends. Pure: no rows, no leases, no time.

Words: v is the announced policy version, K is `max_staleness`, R is `rows_per_version`. A row generated from version
s may be trained for a version p only if p - s <= K; it is *due* in version s + K at the latest.

Entrance. Tickets are issued to an asker that generates from version v_e only if

    outstanding + new <= (K + 1 - (v - v_e)) * R

where outstanding = rows of tickets in flight + rows in the table that are not finished + rows trained for a version
that is not announced as finished yet. As each version trains R rows, the last of these is trained in version v_e + K.

Exit. Under "pace" and "drop" a row that is too old is never handed out; under "mask" and "reweight" it is, and counted,
and its stale tokens are marked (`flight.state.marks`). Under the policy "pace" a take also leaves nothing behind that
could
not be trained in time: for every version d the rows due by d that stay behind must fit into what is left of version
p plus R rows for each version after it up to d. If the batch at hand would break that, and rows that are still on
their way (tickets in flight, rows without all columns) could mend it, the take waits for them. Stragglers therefore
hold the trainer back only when they are really needed; with "drop" they are dropped, and counted, when they come.

Ages and lengths are kept as histograms of what was trained, what of that was too old, and what was dropped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from flight.errors import InvalidRequestError
from flight.schema import StalenessSpec
from flight.state.snapshots import GateSnapshot, TicketSnapshot
from flight.state.tally import Tally


@dataclass(slots=True)
class Ticket:
    """Rows that a producer may still put for one group, generated from `version` or later."""

    num_rows: int
    version: int


class StalenessGate:
    """Counts the outstanding rows of one table and answers who may go in and out."""

    def __init__(self, table: str, spec: StalenessSpec) -> None:
        self.table = table
        self.spec = spec
        self.max_staleness = spec.max_staleness
        self.policy_version = 0
        self.num_waiting = 0
        """Rows in the table that the staleness consumer has not finished."""
        self.trained = Tally()
        """Rows trained for versions that are not announced as finished, by the version that trained them."""
        self.trained_age: Counter[int] = Counter()
        self.dropped_age: Counter[int] = Counter()
        self.stale_age: Counter[int] = Counter()
        """Rows trained though older than the bound, under "mask" and "reweight"; `trained_age` has them too."""
        self.completion_tokens: dict[str, Counter[int]] = {
            kind: Counter() for kind in ("trained", "stale", "dropped")
        }
        """Rows by the length of their completion, in powers of two: key n counts 2 ** (n - 1) <= length < 2 ** n."""
        self.counts: Counter[str] = Counter()
        self.in_flight = Tally()
        """Rows that tickets allow and that have not come yet, by start version."""
        self._tickets: dict[str, Ticket] = {}
        self._begun: dict[str, int] = {}
        """Version from which the work on a group was begun that was given back unfinished."""

    # ---- entrance ---------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Return all rows that count against the bound."""
        return self.in_flight.total() + self.num_waiting + self.trained.total()

    def room(self, adopted_version: int | None) -> int:
        """Return how many more rows an asker that generates from `adopted_version` (default v) may start."""
        adopted = (
            self.policy_version if adopted_version is None else min(adopted_version, self.policy_version)
        )
        lag = self.policy_version - adopted
        return (self.max_staleness + 1 - lag) * self.spec.rows_per_version - self.outstanding

    def most_room(self) -> int:
        """Return the largest number of rows that could ever be started at once."""
        return (self.max_staleness + 1) * self.spec.rows_per_version

    def issue(self, group_id: str, num_rows: int, adopted_version: int | None) -> None:
        """Note a ticket for rows of a group; the caller has asked for `room`."""
        version = self.policy_version if adopted_version is None else adopted_version
        version = min(version, self._begun.get(group_id, version))
        if group_id in self._tickets:
            raise InvalidRequestError(
                f"table {self.table!r}: ticket must be the only one for its group, got two for {group_id!r}; "
                "uids of the tables that issue tickets must differ"
            )
        self._tickets[group_id] = Ticket(num_rows, version)
        self.in_flight.shift(version, num_rows)
        self.counts["issued"] += num_rows

    def release(self, group_id: str) -> None:
        """End a ticket: rows of it that have not come do not count any more. Idempotent."""
        ticket = self._tickets.pop(group_id, None)
        if ticket is not None:
            self.in_flight.shift(ticket.version, -ticket.num_rows)
            self.counts["returned"] += ticket.num_rows

    def begin(self, group_id: str, version: int) -> None:
        """Note that work on a group was begun from `version` and will be gone on with: so count its next tickets."""
        self._begun[group_id] = version

    def end(self, group_id: str) -> None:
        """Forget what was begun: the group is finished, or given up."""
        self._begun.pop(group_id, None)

    def arrive(self, group_id: str, num_rows: int = 1) -> None:
        """Note rows of a group put into the table; they use up its ticket, and count too if there is none."""
        self.num_waiting += num_rows
        ticket = self._tickets.get(group_id)
        num_used = 0
        if ticket is not None:
            num_used = min(num_rows, ticket.num_rows)
            ticket.num_rows -= num_used
            self.in_flight.shift(ticket.version, -num_used)
            self.counts["used"] += num_used
        self.counts["unticketed"] += num_rows - num_used

    # ---- snapshots --------------------------------------------------------------------------------------------

    def capture(self) -> GateSnapshot:
        """Return the books as plain data."""
        return GateSnapshot(
            max_staleness=self.max_staleness,
            policy_version=self.policy_version,
            num_waiting=self.num_waiting,
            trained=dict(self.trained),
            trained_age=dict(self.trained_age),
            dropped_age=dict(self.dropped_age),
            stale_age=dict(self.stale_age),
            completion_tokens={kind: dict(counts) for kind, counts in self.completion_tokens.items()},
            counts=dict(self.counts),
            tickets=[
                TicketSnapshot(group_id=group_id, num_rows=ticket.num_rows, version=ticket.version)
                for group_id, ticket in self._tickets.items()
            ],
            begun=dict(self._begun),
        )

    def restore(self, snapshot: GateSnapshot) -> None:
        """Take back what `capture` returned."""
        self.max_staleness = snapshot.max_staleness
        self.policy_version = snapshot.policy_version
        self.num_waiting = snapshot.num_waiting
        self.trained = Tally(snapshot.trained)
        self.trained_age = Counter(snapshot.trained_age)
        self.dropped_age = Counter(snapshot.dropped_age)
        self.stale_age = Counter(snapshot.stale_age)
        for kind, counts in snapshot.completion_tokens.items():
            self.completion_tokens[kind] = Counter(counts)
        self.counts = Counter(snapshot.counts)
        self._tickets = {each.group_id: Ticket(each.num_rows, each.version) for each in snapshot.tickets}
        self._begun = dict(snapshot.begun)
        self.in_flight = Tally()
        for each in snapshot.tickets:
            self.in_flight.shift(each.version, each.num_rows)

    # ---- exit -------------------------------------------------------------------------------------------------

    def exit_version(self, policy_version: int | None) -> int:
        """Return the version that a take trains for: the asker's, but never below the announced one."""
        return self.policy_version if policy_version is None else max(policy_version, self.policy_version)

    def must_drop(self, start_version: int, exit_version: int) -> bool:
        """Return whether a row generated from `start_version` may not be delivered for `exit_version` any more."""
        return self.spec.policy in ("pace", "drop") and exit_version - start_version > self.max_staleness

    def should_wait(
        self, batch: Tally, left: Tally, coming: Tally, exit_version: int, num_taken: int
    ) -> bool:
        """Return whether taking `batch` would leave rows behind that cannot be trained in time, and waiting helps.

        Counters hold rows by start version: `batch` the oldest ready rows, `left` the other ready ones, `coming` those
        in the table without all columns; tickets in flight are added here. `num_taken` rows of this version are
        leased or trained already.
        """
        if self.spec.policy != "pace":
            return False
        coming = Tally(coming + self.in_flight)
        per_version = self.spec.rows_per_version
        spare = max(0, per_version - num_taken - batch.total())
        oldest = exit_version - self.max_staleness
        behind = due_coming = 0
        for start in sorted({*coming, *left}):
            if start < oldest:
                continue
            behind += left[start] + coming[start]
            due_coming += coming[start]
            can_mend = due_coming > 0 and max(batch) > start
            if can_mend and behind > spare + (start - oldest) * per_version:
                return True
        return False

    def train(self, start_version: int, trained_version: int, max_staleness: int, num_rows: int = 1) -> None:
        """Note that rows were trained for `trained_version`; they are credited once a later version is announced.

        `max_staleness` is the bound that held when they were taken.
        """
        age = trained_version - start_version
        self.num_waiting -= num_rows
        self.trained_age[age] += num_rows
        self.counts["trained"] += num_rows
        if trained_version >= self.policy_version:
            self.trained.shift(trained_version, num_rows)
        if age > max_staleness:
            self.stale_age[age] += num_rows
            self.counts["stale"] += num_rows

    def withdraw(self, kind: str, num_rows: int = 1) -> None:
        """Note that rows left the table untrained: dropped, dead, skipped or abandoned."""
        self.num_waiting -= num_rows
        self.counts[kind] += num_rows

    def count_length(self, kind: str, num_tokens: int) -> None:
        """Note how long the completion of a row was that was "trained", "stale" (trained, but too old) or "dropped"."""
        for each in ("trained", "stale") if kind == "stale" else (kind,):
            self.completion_tokens[each][num_tokens.bit_length()] += 1

    def readmit(self, num_rows: int = 1) -> None:
        """Note that rows that were given up wait again."""
        self.num_waiting += num_rows
        self.counts["requeued"] += num_rows

    def announce(self, policy_version: int) -> None:
        """Set v; rows trained for earlier versions do not count any more. Idempotent.

        Raises:
            InvalidRequestError: the version lies before the announced one.
        """
        if policy_version < self.policy_version:
            raise InvalidRequestError(
                f"table {self.table!r}: policy_version must be at least the announced {self.policy_version}, "
                f"got {policy_version}"
            )
        self.policy_version = policy_version
        for version in [version for version in self.trained if version < policy_version]:
            del self.trained[version]
