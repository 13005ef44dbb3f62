"""Which tables a server has and how they are tied: by tickets, and by the gates of their staleness bounds. Pure.

It knows no verbs of rows; what befalls the rows of one table is carried over to the others in
`flight.state.settlement`.
"""

from __future__ import annotations

from dataclasses import fields

from flight.errors import InvalidRequestError, TableExistsError, TableNotFoundError
from flight.schema import TableSpec
from flight.staleness import StalenessGate
from flight.state.references import References
from flight.table import TableState

_DEFINING = tuple(part.name for part in fields(TableSpec) if part.compare)


class Catalogue:
    """Tables by name, gates by the name of the table that they guard. Not thread-safe."""

    def __init__(self, *, lease_prefix: str = "") -> None:
        self.tables: dict[str, TableState] = {}
        self.gates: dict[str, StalenessGate] = {}
        self.references = References(self.tables)
        self._lease_prefix = lease_prefix

    def table(self, name: str) -> TableState:
        """Return a table.

        Raises:
            TableNotFoundError: there is none of that name.
        """
        if name not in self.tables:
            raise TableNotFoundError(f"server: table must be one of {sorted(self.tables)}, got {name!r}")
        return self.tables[name]

    def create(self, spec: TableSpec, *, exist_ok: bool = True) -> bool:
        """Add a table; return False if the same is there already.

        Raises:
            TableExistsError: one of that name has another specification, or `exist_ok` is false.
        """
        if spec.name in self.tables:
            have = self.tables[spec.name].spec
            if exist_ok and spec in (have, *self.tables[spec.name].former_specs):
                return False
            differs = [name for name in _DEFINING if getattr(have, name) != getattr(spec, name)]
            raise TableExistsError(
                f"server: table {spec.name!r} must be new or the same as it is, got one that differs in {differs}; "
                "drop it first or take another name"
            )
        self.references.check_new(spec)
        self.tables[spec.name] = TableState(spec, lease_prefix=self._lease_prefix)
        self.references.declare(spec)
        if spec.staleness is not None:
            self.gates[spec.name] = StalenessGate(spec.name, spec.staleness)
        return True

    def sources_of(self, name: str) -> list[TableState]:
        """Return the tables whose tickets are for table `name`."""
        return [
            table for table in self.tables.values() if table.spec.tickets and table.spec.tickets.table == name
        ]

    def policy_version(self, name: str) -> int:
        """Return the announced version that matters to a table: its own or that of its tickets' table; else 0."""
        gate = self.gates.get(name) or self._gate_of_tickets(self.tables[name])
        return gate.policy_version if gate else 0

    def gate(self, name: str) -> StalenessGate:
        """Return the gate of a table.

        Raises:
            InvalidRequestError: the table has no staleness bound.
        """
        self.table(name)
        if name not in self.gates:
            raise InvalidRequestError(
                f"table {name!r}: it must have a staleness bound, got none; tables with one: {sorted(self.gates)}"
            )
        return self.gates[name]

    def _gate_of_tickets(self, table: TableState) -> StalenessGate | None:
        return self.gates.get(table.spec.tickets.table) if table.spec.tickets else None
