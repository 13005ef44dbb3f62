"""Rows that were tried too often: kept with their reason until somebody requeues them, as long as there is room. Pure.

A dead letter is a unit (a row, or a whole group) that one consumer has given up after its last attempt. Other consumers
of the same rows are not concerned. What only dead letters keep in a table is *buried*: it counts as free room, and the
oldest dead letters make place when a put needs it or when there are more than the table's `max_dead_letters` rows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from flight.state.leases import Row, Unit
from flight.state.snapshots import LetterSnapshot

DEAD_COLUMNS = ("dead_consumer", "dead_attempts", "dead_reason")
"""Columns that `read` adds for dead letters."""


@dataclass(slots=True, eq=False)
class DeadLetter:
    """What one consumer gave up, and why."""

    consumer: str
    rows: list[Row]
    attempts: int
    reason: str


class DeadLetters:
    """Dead letters of one table, oldest first."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.num_rows = 0
        """Rows of all letters; a row given up by two consumers counts twice."""
        self._letters: dict[tuple[str, int], DeadLetter] = {}

    def capture(self) -> list[LetterSnapshot]:
        """Return the dead letters as plain data, oldest first."""
        return [
            LetterSnapshot(
                consumer=letter.consumer,
                row_ids=[row.row_id for row in letter.rows],
                attempts=letter.attempts,
                reason=letter.reason,
            )
            for letter in self._letters.values()
        ]

    def add(self, consumer: str, unit: Unit, reason: str) -> None:
        """Keep a unit; the caller lets the `surplus` go."""
        letter = DeadLetter(consumer, list(unit.rows), unit.attempts, reason)
        self._letters[consumer, unit.rows[0].row_id] = letter
        self.num_rows += len(letter.rows)

    def surplus(self) -> DeadLetter | None:
        """Return the oldest letter if there are more than the limit, else None."""
        return next(iter(self._letters.values())) if self.num_rows > self.max_rows else None

    def oldest_buried(self, buried: Collection[int]) -> DeadLetter | None:
        """Return the oldest letter with a row that nothing but dead letters keeps, None if there is none."""
        letters = self._letters.values() if buried else ()
        return next((each for each in letters if any(row.row_id in buried for row in each.rows)), None)

    def of(self, consumer: str | None = None, uids: Collection[str] | None = None) -> list[DeadLetter]:
        """Return the letters of a consumer (None: all) with a row of `uids` (None: all), oldest first."""
        return [
            letter
            for letter in self._letters.values()
            if (consumer is None or letter.consumer == consumer)
            and (uids is None or any(row.uid in uids for row in letter.rows))
        ]

    def holding(self, row: Row) -> list[DeadLetter]:
        """Return the letters that a row is in."""
        return [letter for letter in self._letters.values() if row in letter.rows] if row.dead else []

    def remove(self, letter: DeadLetter) -> None:
        """Forget a letter; its rows stay as they are."""
        del self._letters[letter.consumer, letter.rows[0].row_id]
        self.num_rows -= len(letter.rows)
