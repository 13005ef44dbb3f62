"""Which rows a table holds: numbers, uids, groups, room and the end. Pure data; consumers are in `flight.table`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import count, islice, repeat

from flight.errors import CapacityError, InvalidRequestError
from flight.schema import KEY_COLUMNS, TableSpec
from flight.state.ending import Ending
from flight.state.groups import GroupBook
from flight.state.leases import Row
from flight.state.snapshots import RowsSnapshot, TableSnapshot

RETIRED_UIDS_KEPT = 100_000
"""Uids of retired rows remembered a table; a put repeated later than that makes a new row."""

REFERENCED = 1 << 62
"""Bit of `Row.pending` in a table that others refer to: something refers to the row, or may yet. See
`flight.state.references`."""


class RowBook:
    """Rows by number and by uid.

    Room is counted so that a table cannot lock itself: an open group holds room for all its rows, so the rest of a
    group always fits, and a part of a row that exists needs no room.
    """

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.rows: dict[int, Row] = {}
        self.counts: Counter[str] = Counter()
        self.retired: list[int] = []
        """Rows retired since the owner last cleared this list."""
        self.part_names = list(dict.fromkeys(column.writer for column in spec.columns)) or [""]
        by_group = any(consumer.sampler == "groups" for consumer in spec.consumers)
        self.groups = GroupBook(spec.group_size) if by_group else None
        self._by_uid: dict[str, Row | int] = {}
        """A row, or the number of one that is retired and still remembered."""
        self._retired_uids: deque[str] = deque()
        """Those that are remembered, oldest first."""
        self.end = Ending(spec.name)
        self.buried: dict[int, Row] = {}
        """Rows that only dead letters keep; they count as free room."""
        self.unreferenced: dict[int, Row] | None = None
        """Rows that nothing has referred to yet, oldest first; None in a table that no other refers to."""
        self._num_truncated = 0
        self.next_row_id = 0
        """The number of the next new row; numbers are never given twice, whatever happens to counts."""

    def parts_of(self, columns: Sequence[str]) -> int:
        """Return the bit set of the parts that hold `columns`; key columns are in every part."""
        parts = 0
        for name in columns:
            if name not in KEY_COLUMNS:
                parts |= 1 << self.part_names.index(self.spec.columns_by_name[name].writer)
        return parts

    def look_up(self, uids: Sequence[str]) -> list[Row | int | None]:
        """Return what each uid is: a row of the table, the number of one that is retired, or new."""
        return list(map(self._by_uid.get, uids))

    def find(self, uid: str) -> Row | None:
        """Return the row of that uid if it is in the table."""
        found = self._by_uid.get(uid)
        return found if isinstance(found, Row) else None

    def find_retired(self, uid: str) -> int | None:
        """Return the number that a retired row had, if its uid is still remembered."""
        found = self._by_uid.get(uid)
        return found if isinstance(found, int) else None

    def some_rows(self, max_rows: int | None, *, newest: bool) -> list[Row]:
        """Return the oldest (or newest) rows of the table, at most `max_rows`, oldest first."""
        if newest:
            return list(islice(reversed(self.rows.values()), max_rows))[::-1]
        return list(islice(self.rows.values(), max_rows))

    def num_new(self, uids: Sequence[str]) -> int:
        """Return how many of these uids are neither in the table nor remembered as retired."""
        if self.are_new(uids):
            return len(uids)
        return sum(uid not in self._by_uid for uid in uids)

    def are_new(self, uids: Sequence[str]) -> bool:
        """Return whether all of these uids are new, as they mostly are."""
        return self._by_uid.keys().isdisjoint(uids)

    @property
    def is_closed(self) -> bool:
        """Return whether no new row can come."""
        return self.end.is_reached(self.num_put)

    @property
    def num_put(self) -> int:
        """Return how many rows have come since the table was empty, without those that may come again."""
        return self.counts["put"] - self._num_to_come_again - self._num_truncated

    @property
    def _num_to_come_again(self) -> int:
        return self.counts["retracted"] + self.counts["lost"]

    @property
    def num_reserved(self) -> int:
        """Return the rows that the table holds for its consumers or keeps room for."""
        return len(self.rows) - len(self.buried) + (self.groups.num_open if self.groups else 0)

    @property
    def num_held(self) -> int:
        """Return the rows that are there or have room kept, those included that only dead letters keep."""
        return self.num_reserved + len(self.buried)

    def room_needed(self, uids: Sequence[str], group_ids: Sequence[str]) -> int:
        """Return the rows of room that a put needs beyond what is reserved; the put fits if this is at most `room`.

        Raises:
            InvalidRequestError: a uid is empty or twice in the put, or a group would get too many rows.
            TableSealedError: there are new rows after the end.
            CapacityError: the put can never fit.
        """
        where = f"put into {self.spec.name}"
        if len(set(uids)) != len(uids):
            twice = next(uid for uid, num in Counter(uids).items() if num > 1)
            raise InvalidRequestError(f"{where}: uid must be unique inside a batch, got {twice!r} twice")
        if not self.are_new(uids):
            group_ids = [
                group_id for uid, group_id in zip(uids, group_ids, strict=True) if uid not in self._by_uid
            ]
        self.end.check_open(where, len(group_ids), self.num_put, group_ids)
        needed = self.groups.room_needed(where, Counter(group_ids)) if self.groups else len(group_ids)
        if needed > self.spec.capacity_rows:
            raise CapacityError(
                f"{where}: one batch must need at most capacity_rows {self.spec.capacity_rows} rows, got {needed}; "
                "cut the batch or raise the capacity"
            )
        return needed

    @property
    def room(self) -> int:
        """Return the rows of room that are neither used nor reserved."""
        return self.spec.capacity_rows - self.num_reserved

    def seal(self, expected_rows: int | None = None) -> None:
        """Declare the end: no new rows, or none beyond `expected_rows` in all; see `flight.state.ending`.

        Idempotent.
        """
        self.end.declare(expected_rows, self.num_put)

    def forget_retired(self) -> None:
        """Forget the uids of rows that are gone, so that these may come again."""
        for uid in self._retired_uids:
            del self._by_uid[uid]
        self._retired_uids.clear()

    def begin_anew(self) -> None:
        """Forget uids and the end, once all rows are gone; row numbers go on."""
        self.forget_retired()
        self._by_uid.clear()
        self.end = Ending(self.spec.name)
        self._num_truncated = self.counts["put"] - self._num_to_come_again

    def capture_rows(self) -> RowsSnapshot:
        """Return the rows as plain data."""
        rows = self.rows.values()
        return RowsSnapshot(
            row_ids=list(self.rows),
            uids=[row.uid for row in rows],
            group_ids=[row.group_id for row in rows],
            versions=[row.version for row in rows],
            parts=[row.parts for row in rows],
            pending=[row.pending for row in rows],
            given_up=[row.given_up for row in rows],
            dead=[row.dead for row in rows],
            put_at=[row.put_at for row in rows],
            num_made=[row.num_made for row in rows],
            labels=[dict(row.labels) for row in rows],
        )

    def restore_rows(self, snapshot: TableSnapshot) -> None:
        """Take back rows, uids, groups, counts and the end into an empty table."""
        each = snapshot.rows
        rows = list(
            map(
                Row,
                *(each.row_ids, each.uids, each.group_ids, each.versions, each.parts, each.pending),
                *(each.put_at, each.labels, each.given_up, each.dead, each.num_made),
            )
        )
        self.rows.update(zip(each.row_ids, rows, strict=True))
        self._by_uid.update(zip(each.uids, rows, strict=True))
        self._by_uid.update(zip(snapshot.retired_uids, snapshot.retired_row_ids, strict=True))
        self._retired_uids.extend(snapshot.retired_uids)
        self.counts = Counter(snapshot.counts)
        self._num_truncated = snapshot.num_truncated
        self.next_row_id = self.counts["put"] if snapshot.next_row_id is None else snapshot.next_row_id
        self.end.restore(snapshot.ending)
        if self.groups:
            self.groups.restore(rows, snapshot.arrived)
        if snapshot.is_referred_to:
            # Those that something refers to are taken out when the rows that do so have their values again.
            self.unreferenced = {row.row_id: row for row in rows if row.pending & REFERENCED}

    def capture_retired(self) -> tuple[list[str], list[int]]:
        """Return the uids of retired rows that are remembered, oldest first, and the numbers that they had."""
        found = ((uid, self.find_retired(uid)) for uid in self._retired_uids)
        retired = [(uid, row_id) for uid, row_id in found if row_id is not None]
        return [uid for uid, _ in retired], [row_id for _, row_id in retired]

    def skip_row_ids(self, row_id: int) -> None:
        """Let the next new row have this number, if it lies ahead: the rows between were put, and are lost."""
        self.counts["put"] += max(0, row_id - self.next_row_id)
        self.next_row_id = max(self.next_row_id, row_id)

    @property
    def num_truncated(self) -> int:
        """Return how many rows came before the table was last truncated."""
        return self._num_truncated

    def add(
        self,
        uids: Sequence[str],
        group_ids: Sequence[str],
        versions: Iterable[int],
        *,
        parts: int,
        pending: int,
        now: float,
    ) -> list[Row]:
        """Make rows of new uids that `pending` consumers have to finish; one version a row, at least."""
        first = self.next_row_id
        rows = list(
            map(Row, count(first), uids, group_ids, versions, repeat(parts), repeat(pending), repeat(now))
        )
        self.counts["put"] += len(rows)
        self.next_row_id += len(rows)
        self.rows.update(zip(count(first), rows))
        self._by_uid.update(zip(uids, rows, strict=True))
        if self.end.num_never:
            for group_id in group_ids:
                self.end.arrive(group_id)
        if self.groups:
            for row in rows:
                self.groups.join(row)
        if self.unreferenced is not None:
            for row in rows:
                row.pending |= REFERENCED
                self.unreferenced[row.row_id] = row
        return rows

    def retire(self, rows: Sequence[Row], *, forget_uid: bool = False) -> None:
        """Remove rows; their uids are remembered for a while, or forgotten so that they can come anew."""
        row_ids = [row.row_id for row in rows]
        uids = [row.uid for row in rows]
        for row_id in row_ids:
            del self.rows[row_id]
        if self.unreferenced is not None:
            for row_id in row_ids:
                self.unreferenced.pop(row_id, None)
        if forget_uid or self.unreferenced is not None:
            for uid in uids:
                del self._by_uid[uid]
        else:
            self._by_uid.update(zip(uids, row_ids, strict=True))
            self._retired_uids.extend(uids)
            while len(self._retired_uids) > RETIRED_UIDS_KEPT:
                del self._by_uid[self._retired_uids.popleft()]
        if self.buried:
            for row in rows:
                self.buried.pop(row.row_id, None)
        self.retired += row_ids
        self.counts["retired"] += len(rows)
        if self.groups:
            for row in rows:
                self.groups.leave(row)
