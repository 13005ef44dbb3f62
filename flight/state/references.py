"""Columns that refer to rows of another table: a row lives while any other row refers to it. Pure.

A column declared with `references` holds uids of that table, its *target*: one a row, or a list of them. What a row
refers to must be there when it is put, and stays as long as the row does. A row of a target goes once nothing refers to
it any more and all its consumers have finished it; one that nothing has referred to yet stays until something does, or
until it is older than the target's `max_age_s`. Its uid is forgotten, so that the same content may come again.

    put of a target row --> held, waiting for its first reference --max_age_s--> gone
                              | put of a row that refers to it          (put refused if it is gone: put it again)
                              v
                            held by its references --the last row that refers to it leaves--> gone

A row of a target can be lost all the same, with the storage server that had its values: what refers to it is lost too.

The counts follow from the rows that are there and nothing else. A put costs its references, a row that leaves those
that it had; a list that names a uid twice refers to it once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from flight.errors import InvalidRequestError, MissingReferencesError, TableNotFoundError
from flight.schema import TableSpec
from flight.state.leases import Row
from flight.table import TableState

MAX_SHOWN = 16
"""Missing uids that one refusal names."""


@dataclass(frozen=True, kw_only=True)
class Referring:
    """What the rows of one put refer to in one column: `uids` a row, in the order of the rows."""

    column: str
    writer: str
    target: str
    uids: Sequence[Sequence[str]]


Reference = tuple[int, str, tuple[str, ...]]
"""A row of a put by its place in it, a target, and the uids that the row refers to there."""


class ReferenceCounts:
    """How many rows refer to each uid of each target, and what each row refers to. It knows no tables."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}
        self._held: dict[str, dict[int, list[tuple[str, str]]]] = {}

    def count(self, target: str, uid: str) -> int:
        """Return how many times rows refer to a uid."""
        return self._counts.get(target, {}).get(uid, 0)

    def num_held(self, target: str) -> int:
        """Return how many rows of a target are referred to."""
        return len(self._counts.get(target, {}))

    def add(self, source: str, row_id: int, target: str, uids: Sequence[str]) -> list[str]:
        """Note that a row refers to `uids`, each once; return those that nothing referred to before."""
        counts = self._counts.setdefault(target, {})
        held = self._held.setdefault(source, {}).setdefault(row_id, [])
        first = []
        for uid in uids:
            held.append((target, uid))
            counts[uid] = counts.get(uid, 0) + 1
            if counts[uid] == 1:
                first.append(uid)
        return first

    def leave(self, source: str, row_ids: Sequence[int]) -> dict[str, list[str]]:
        """Note that rows are gone; return, by target, the uids that nothing refers to any more."""
        held = self._held.get(source)
        free: dict[str, list[str]] = {}
        for row_id in row_ids if held else ():
            for target, uid in held.pop(row_id, ()) if held else ():
                counts = self._counts[target]
                counts[uid] -= 1
                if not counts[uid]:
                    del counts[uid]
                    free.setdefault(target, []).append(uid)
        return free

    def referring_to(self, target: str, uids: Collection[str]) -> dict[str, list[int]]:
        """Return, by table, the rows that refer to any of `uids`; looks at all that refer to something."""
        counts = self._counts.get(target, {})
        wanted = {(target, uid) for uid in uids if uid in counts}
        if not wanted:
            return {}
        found = {
            source: [row_id for row_id, refers_to in held.items() if not wanted.isdisjoint(refers_to)]
            for source, held in self._held.items()
        }
        return {source: row_ids for source, row_ids in found.items() if row_ids}

    def rows_without(self, source: str, is_there: Callable[[str, str], bool]) -> list[int]:
        """Return the rows of a table that refer to something that is not there."""
        held = self._held.get(source, {})
        return [
            row_id for row_id, references in held.items() if not all(is_there(*each) for each in references)
        ]

    def rows_of(self, source: str) -> list[int]:
        """Return the rows of a table that refer to something."""
        return list(self._held.get(source, {}))


class References:
    """The references between the tables of one server. `tables` are the owner's and change under it."""

    def __init__(self, tables: Mapping[str, TableState]) -> None:
        self.counts = ReferenceCounts()
        self._tables = tables
        self._targets: set[str] = set()

    def declare(self, spec: TableSpec) -> None:
        """Take note of a table that was made or changed; the tables may come in any order."""
        for target in spec.references():
            self._targets.add(target)
            if target in self._tables:
                self._tables[target].hold_for_references()
        if spec.name in self._targets:
            self._tables[spec.name].hold_for_references()

    def expect(self, name: str) -> None:
        """Note that rows of a table are held for references, though perhaps no table that refers to it is there."""
        self._targets.add(name)

    def check_new(self, spec: TableSpec) -> None:
        """Raise unless a table may be as `spec` says, as far as references go.

        Raises:
            InvalidRequestError: rows of the table, or of one that it refers to, come and go by groups or versions.
        """
        if spec.name in self._targets:
            self._check_target("another table", spec)
        for target in spec.references():
            if target in self._tables:
                self._check_target(spec.name, self._tables[target].spec)

    def _check_target(self, source: str, spec: TableSpec) -> None:
        if spec.staleness is not None or any(each.sampler == "groups" for each in spec.consumers):
            raise InvalidRequestError(
                f"table {spec.name!r}: consumers must not take groups, nor be bound in staleness, in a table that "
                f"{source} refers to, got {[each.name for each in spec.consumers]}; refer to a table of its own"
            )

    def missing(self, name: str, uids: Sequence[str]) -> list[str]:
        """Return those of `uids` that are not in a table now, each once, in order."""
        find = self._tables[name].find
        return [uid for uid in dict.fromkeys(uids) if find(uid) is None]

    def check_unreferenced(self, name: str, verb: str) -> None:
        """Raise if rows of other tables refer to rows of this one.

        Raises:
            InvalidRequestError: they do, and would be left without what they refer to.
        """
        num_held = self.counts.num_held(name)
        if num_held:
            sources = [each.spec.name for each in self._tables.values() if name in each.spec.references()]
            raise InvalidRequestError(
                f"{verb} {name}: rows of other tables must not refer to it, got {num_held} rows that those of "
                f"{sources} refer to; drop or truncate these first"
            )

    # ---- rows -------------------------------------------------------------------------------------------------

    def admit(self, name: str, uids: Sequence[str], referring: Sequence[Referring]) -> list[Reference]:
        """Return what the new parts of a put refer to, for `note`; nothing is changed yet.

        Raises:
            MissingReferencesError: some of it is not there; the message names the uids.
            TableNotFoundError: there is no such table yet.
        """
        return [found for column in referring for found in self._admit_column(name, uids, column)]

    def _admit_column(self, name: str, uids: Sequence[str], column: Referring) -> list[Reference]:
        source, target = self._tables[name], self._tables.get(column.target)
        bit = 1 << source.part_names.index(column.writer)
        found: list[Reference] = []
        missing: dict[str, None] = {}
        for index, uid in enumerate(uids):
            wanted = tuple(dict.fromkeys(column.uids[index]))
            row = source.find(uid)
            is_there = row.parts & bit if row is not None else source.find_retired(uid) is not None
            if is_there or not wanted:
                continue
            if target is None:
                raise TableNotFoundError(
                    f"put into {name}: the table that {column.column} refers to must exist, got {column.target!r}; "
                    "create it first"
                )
            found.append((index, column.target, wanted))
            missing.update((each, None) for each in wanted if target.find(each) is None)
        if missing:
            shown = list(missing)[:MAX_SHOWN]
            more = f" and {len(missing) - len(shown)} more" if len(missing) > len(shown) else ""
            raise MissingReferencesError(
                f"put into {name}: {column.column} must refer to rows of table {column.target!r}, got "
                f"{len(missing)} that are not there: {shown}{more}; put these first, then repeat"
            )
        return found

    def note(self, name: str, row_ids: Sequence[int], references: Sequence[Reference]) -> None:
        """Count what `admit` returned, now that the rows are in; `row_ids` is one for each row of the put."""
        for index, target, uids in references:
            for uid in self.counts.add(name, row_ids[index], target, uids):
                self._tables[target].hold(uid)

    def restore(self, name: str, row_ids: Sequence[int], referring: Sequence[Referring]) -> None:
        """Count again what rows of a table refer to, from a journal; negative `row_ids` are rows that are gone."""
        for column in referring:
            for row_id, uids in zip(row_ids, column.uids, strict=True):
                if row_id >= 0 and uids and column.target in self._tables:
                    for uid in self.counts.add(name, row_id, column.target, tuple(dict.fromkeys(uids))):
                        self._tables[column.target].hold(uid)

    def dangling(self) -> dict[str, list[int]]:
        """Return rows by table that refer to what is not there; there are none unless a journal was damaged."""
        return {
            source: row_ids
            for source, table in self._tables.items()
            if table.spec.references() and (row_ids := self.counts.rows_without(source, self._is_there))
        }

    def _is_there(self, target: str, uid: str) -> bool:
        return target in self._tables and self._tables[target].find(uid) is not None

    def leave(self, name: str, row_ids: Sequence[int]) -> list[str]:
        """Note that rows of a table are gone, and let go what only they referred to; return the targets concerned."""
        free = self.counts.leave(name, row_ids)
        for target, uids in free.items():
            self._tables[target].let_go(uids)
        return list(free)

    def referring_to(self, name: str, uids: Sequence[str]) -> list[tuple[str, Sequence[Row]]]:
        """Return, by table, the rows that refer to rows of this one that were lost."""
        found = self.counts.referring_to(name, uids)
        rows = {source: self._tables[source].rows for source in found}
        return [
            (source, [rows[source][row_id] for row_id in row_ids if row_id in rows[source]])
            for source, row_ids in found.items()
        ]

    def drop(self, name: str) -> list[str]:
        """Note that a table is gone with all its rows; return what `leave` does."""
        declared = {target for table in self._tables.values() for target in table.spec.references()}
        self._targets &= declared | self._tables.keys()
        return self.leave(name, self.counts.rows_of(name))
