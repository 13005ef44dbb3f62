"""The end of a table: declared by `seal`, and reached when all expected rows have come or never will. Pure.

Rows never come when the prompt whose ticket was their permit is finished without them: skipped, dead, expired,
truncated, or acked short. They count towards the expected rows, so that nobody waits for them. Should some come late
after all, or their prompt be requeued, they are expected again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from flight.errors import InvalidRequestError, TableSealedError
from flight.state.snapshots import EndingSnapshot

MISSING_GROUPS_KEPT = 100_000
"""Groups that ended short and are remembered, so that a late row of one is not counted twice."""


class Ending:
    """What is known about the end of one table."""

    def __init__(self, table: str) -> None:
        self.table = table
        self.is_declared = False
        self.expected_rows: int | None = None
        self.num_never = 0
        """Rows that will not come."""
        self._missing: OrderedDict[str, int] = OrderedDict()

    def is_reached(self, num_put: int) -> bool:
        """Return whether no new row can come."""
        return self.is_declared and (
            self.expected_rows is None or num_put + self.num_never >= self.expected_rows
        )

    def declare(self, expected_rows: int | None, num_put: int) -> None:
        """Declare the end: now, or once `expected_rows` have come in all. Idempotent.

        Raises:
            InvalidRequestError: more rows than that are there already.
        """
        if expected_rows is not None and expected_rows < num_put:
            raise InvalidRequestError(
                f"seal {self.table}: expected_rows must be at least the {num_put} rows put so far, got {expected_rows}"
            )
        if not self.is_reached(num_put):
            self.is_declared = True
            self.expected_rows = expected_rows

    def check_open(self, where: str, num_new: int, num_put: int, group_ids: Iterable[str]) -> None:
        """Raise unless `num_new` rows of these groups may come.

        Raises:
            TableSealedError: they come after the end, or are more than are expected.
        """
        if not num_new or not self.is_declared:
            return
        if self.expected_rows is None:
            raise TableSealedError(f"{where}: new rows must come before the seal, got {num_new} after it")
        if self.is_reached(num_put) and num_put < self.expected_rows:
            raise TableSealedError(
                f"{where}: new rows must come before the end, got {num_new} after {num_put} rows came and "
                f"{self.num_never} were given up with their prompts; requeue the prompts first"
            )
        given_up = self.num_never - sum(self._missing.get(group_id, 0) for group_id in set(group_ids))
        if num_put + given_up + num_new > self.expected_rows:
            raise TableSealedError(
                f"{where}: rows must be at most the expected {self.expected_rows}, "
                f"got {num_new} more than the {num_put} that came"
                + (f" and the {given_up} that will not" if given_up else "")
            )

    def miss(self, group_id: str, num_rows: int) -> None:
        """Note that rows of a group will not come."""
        if num_rows <= 0:
            return
        self._missing[group_id] = self._missing.get(group_id, 0) + num_rows
        self.num_never += num_rows
        if len(self._missing) > MISSING_GROUPS_KEPT:
            self._missing.popitem(last=False)

    def arrive(self, group_id: str) -> None:
        """Note a row; if it was given up, it is not any more."""
        if group_id in self._missing:
            self._unmiss(group_id, 1)

    def expect_again(self, group_id: str) -> None:
        """Note that the rows of a group may come after all."""
        self._unmiss(group_id, self._missing.get(group_id, 0))

    def capture(self) -> EndingSnapshot:
        """Return all of it as plain data."""
        return EndingSnapshot(
            is_declared=self.is_declared,
            expected_rows=self.expected_rows,
            num_never=self.num_never,
            missing=list(self._missing.items()),
        )

    def restore(self, snapshot: EndingSnapshot) -> None:
        """Take back what `capture` returned."""
        self.is_declared = snapshot.is_declared
        self.expected_rows = snapshot.expected_rows
        self.num_never = snapshot.num_never
        self._missing = OrderedDict(snapshot.missing)

    def _unmiss(self, group_id: str, num_rows: int) -> None:
        if num_rows:
            self.num_never -= num_rows
            self._missing[group_id] -= num_rows
            if not self._missing[group_id]:
                del self._missing[group_id]
