"""Which groups of a table are open, whole, or can never be whole; and the room that open ones hold. Pure data.

It is not the sampler: `flight.state.cursor` delivers groups. An open group holds room for all its rows, so that a full
table never shuts out the rows that would let a group be taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from flight.errors import InvalidRequestError
from flight.state.leases import Row


@dataclass(slots=True)
class Group:
    """How many rows of a group have come, and which of them are in the table."""

    num_arrived: int = 0
    rows: list[Row] = field(default_factory=list)


class GroupBook:
    """Groups of one table, all of `group_size` rows."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.num_open = 0
        """Rows that open groups still lack."""
        self.num_stranded = 0
        """Rows that belong to open groups."""
        self._groups: dict[str, Group] = {}

    def room_needed(self, where: str, new_rows: Counter[str]) -> int:
        """Return the room that new rows, counted by group, need beyond what their open groups hold already.

        Raises:
            InvalidRequestError: a group would get more rows than it has.
        """
        needed = 0
        for group_id, num_rows in new_rows.items():
            group = self._groups.get(group_id)
            total = num_rows + (group.num_arrived if group else 0)
            if total > self.group_size:
                raise InvalidRequestError(
                    f"{where}: group {group_id!r} must have {self.group_size} rows, got {total}; "
                    "set group_id of each row"
                )
            needed += 0 if group else self.group_size
        return needed

    def join(self, row: Row) -> None:
        """Note a new row."""
        group = self._groups.get(row.group_id)
        if group is None:
            group = self._groups[row.group_id] = Group()
            self.num_open += self.group_size
        group.num_arrived += 1
        group.rows.append(row)
        self.num_open -= 1
        self.num_stranded += 1 if group.num_arrived < self.group_size else 1 - self.group_size

    def leave(self, row: Row) -> None:
        """Note that a row was retired; a group without rows is forgotten."""
        group = self._groups[row.group_id]
        group.rows.remove(row)
        if not group.rows:
            del self._groups[row.group_id]
            if group.num_arrived < self.group_size:
                self.num_open -= self.group_size - group.num_arrived
                self.num_stranded -= group.num_arrived

    def rows_of(self, group_id: str) -> list[Row]:
        """Return the rows of a group that are in the table."""
        group = self._groups.get(group_id)
        return list(group.rows) if group else []

    def is_torn(self, group_id: str) -> bool:
        """Return whether some rows of a group have left already."""
        group = self._groups.get(group_id)
        return group is None or len(group.rows) < group.num_arrived

    def arrivals(self) -> dict[str, int]:
        """Return how many rows of each group have come, for a snapshot."""
        return {group_id: group.num_arrived for group_id, group in self._groups.items()}

    def restore(self, rows: Iterable[Row], arrivals: dict[str, int]) -> None:
        """Take back what `arrivals` returned; `rows` are those that are in the table."""
        for group_id, num_arrived in arrivals.items():
            self._groups[group_id] = Group(num_arrived)
        for row in rows:
            self._groups[row.group_id].rows.append(row)
        still_open = [num for num in arrivals.values() if num < self.group_size]
        self.num_open = sum(self.group_size - num for num in still_open)
        self.num_stranded = sum(still_open)

    def incomplete(self, group_id: str) -> list[Row]:
        """Return the rows of a group that is not whole yet."""
        group = self._groups.get(group_id)
        return list(group.rows) if group and group.num_arrived < self.group_size else []
