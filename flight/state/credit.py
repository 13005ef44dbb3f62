"""How much a subscriber lets the server push: rows, bytes, or both. Pure arithmetic, no streams.

What is pushed is spent, what the subscriber grants is added; it grants again what it has finished. Rows are exact. The
size of rows is known only once they are leased: by bytes the first push is as small as it may be, later ones follow the
mean size so far, and a push may go beyond the credit by what its rows are larger than that.
"""

from __future__ import annotations

from flight.errors import InvalidRequestError

MAX_CREDIT = 1 << 50


class Credit:
    """What may still be pushed. None means that rows (or bytes) are not limited; one of both must be."""

    def __init__(self, rows: int | None, num_bytes: int | None) -> None:
        self.rows = rows
        self.num_bytes = num_bytes
        self._rows_pushed = 0
        self._bytes_pushed = 0
        if rows is None and num_bytes is None:
            raise InvalidRequestError("subscribe: credit must be in rows or bytes, got neither")
        self.grant(0, 0)

    def grant(self, rows: int, num_bytes: int) -> None:
        """Let the server push more.

        Raises:
            InvalidRequestError: a grant is negative or beyond any memory.
        """
        for what, have, more in (("rows", self.rows, rows), ("bytes", self.num_bytes, num_bytes)):
            if not 0 <= more <= MAX_CREDIT or (have is not None and have + more > MAX_CREDIT):
                raise InvalidRequestError(
                    f"subscription: credit in {what} must be from 0 to {MAX_CREDIT} in all, got {more} more"
                )
        if self.rows is not None:
            self.rows += rows
        if self.num_bytes is not None:
            self.num_bytes += num_bytes

    def most_rows(self, max_rows: int, at_least: int) -> int:
        """Return how many rows may be pushed at once, at most `max_rows`; 0 if not even `at_least`."""
        rows = max_rows if self.rows is None else min(max_rows, self.rows)
        if self.num_bytes is not None:
            if self.num_bytes <= 0:
                return 0
            mean = self._bytes_pushed / self._rows_pushed if self._rows_pushed else None
            fitting = at_least if mean is None else int(self.num_bytes / max(mean, 1.0))
            rows = min(rows, max(fitting, at_least))
        return rows if rows >= at_least else 0

    def spend(self, rows: int, num_bytes: int) -> None:
        """Note what was pushed."""
        self._rows_pushed += rows
        self._bytes_pushed += num_bytes
        if self.rows is not None:
            self.rows -= rows
        if self.num_bytes is not None:
            self.num_bytes -= num_bytes
