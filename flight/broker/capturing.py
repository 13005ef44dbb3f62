"""All tables as they are at one moment: definitions, state, and where the values of every row lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flight.broker.core import BrokerCore
from flight.data.store import Run
from flight.schema import TableSpec
from flight.state.snapshots import GateSnapshot, TableSnapshot


@dataclass(frozen=True, kw_only=True)
class CapturedTable:
    """A table at one moment; nothing that happens later changes it.

    definitions: what it was at first and after each change; the last one is what it is.
    places: by writer, the number of its part and where the rows' values lie, in the order of `state.rows`.
    """

    definitions: Sequence[TableSpec]
    state: TableSnapshot
    gate: GateSnapshot | None
    places: Mapping[str, tuple[int, Sequence[Run]]]


class BrokerCapturing(BrokerCore):
    """The verb that looks at everything."""

    def capture(self) -> list[CapturedTable]:
        """Return all tables at this moment; the lock is held for as long as rows are copied, not their values."""
        with self._locked():
            captured = []
            for name, table in self._ledger.tables.items():
                state = table.capture()
                row_ids = state.rows.row_ids
                places = {
                    writer: (part, self._stores[name].locate(part, row_ids))
                    for part, writer in enumerate(table.part_names)
                }
                gate = self._ledger.gates[name].capture() if name in self._ledger.gates else None
                captured.append(
                    CapturedTable(
                        definitions=(*table.former_specs, table.spec), state=state, gate=gate, places=places
                    )
                )
            return captured
