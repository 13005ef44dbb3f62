"""The verbs of storage servers: join, beat, leave, and whose values are where. Under the broker's lock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flight.broker.core import BrokerCore, Wait
from flight.broker.remote import single_addresses
from flight.schema import TableSpec
from flight.storage import addresses
from flight.storage.messages import BeatAnswer, Placement, Run, StorageBeat
from flight.storage.stubs import Stub, stub_spec


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Rows of a table that one owner has whole; an empty `location` is the coordinator, which has or gathers them."""

    location: str
    row_ids: list[Run]
    numbers: list[Run]
    uids: list[str]


class BrokerStorage(BrokerCore):
    """What storage servers ask of a coordinator."""

    @property
    def placement_version(self) -> int:
        """Return the version of the placement; 0 as long as no storage server has ever joined."""
        return self._owners.version

    def placement(self) -> Placement:
        """Return who takes rows."""
        with self._locked():
            return self._owners.placement(self.clock())

    def join(self, location: str, capacity_bytes: int | None) -> int:
        """Add a storage server and return its number. Whoever was at that location before is lost."""
        with self._locked():
            for owner in self._owners.at(location):
                self._lose(owner, "another one has its address")
            return self._owners.join(location, capacity_bytes, self.clock())

    def beat(self, beat: StorageBeat, wait: Wait) -> BeatAnswer:
        """Note that a storage server is there, and return what it may free; waits for something until the deadline."""
        with self._locked():
            is_urgent = self._owners.hear(beat, self.clock())
            while not is_urgent and not self._owners.has_news(beat.owner):
                left_s = wait.deadline - self.clock()
                if left_s <= 0 or wait.is_gone():
                    break
                self._owner_news.wait(left_s)
                self._catch_up()
            return self._owners.answer(beat, self.clock())

    def leave(self, owner: int) -> None:
        """Let a storage server go; what it still holds is lost. Idempotent."""
        with self._locked():
            self._lose(owner, "it has left")

    def lose_owner(self, owner: int, why: str) -> None:
        """Give a storage server up: the rows of which it has values leave their tables, counted as `lost`."""
        with self._locked():
            self._lose(owner, why)

    def still_there(self, name: str, row_ids: Sequence[int]) -> list[bool]:
        """Return for each row whether it is in the table."""
        with self._locked():
            rows = self._ledger.table(name).rows
            return [row_id in rows for row_id in row_ids]

    def shards(self, name: str) -> list[Shard]:
        """Return who has which rows of a table; none if no storage server has any."""
        with self._locked():
            if not self._owners.remote_bytes.get(name):
                return []
            table = self._ledger.table(name)
            rows = list(table.rows.values())
            row_ids = np.array([row.row_id for row in rows], np.int64)
            found = single_addresses(table, self._stores[name], row_ids.tolist())
            locations = self._owners.locations
        owner_of = addresses.owners_of(found)
        shards = []
        for owner in np.unique(owner_of).tolist():
            chosen = np.flatnonzero(owner_of == owner)
            location = locations.get(owner, "")
            shards.append(
                Shard(
                    location=location,
                    row_ids=addresses.to_runs(row_ids[chosen]),
                    numbers=addresses.to_runs(addresses.numbers_of(found[chosen])) if location else [],
                    uids=[] if location else [rows[index].uid for index in chosen.tolist()],
                )
            )
        return shards

    def _stub_spec(self, name: str, stub: Stub) -> TableSpec:
        """Return what stubs of a table look like."""
        with self._locked():
            self._owners.admit(stub)
            spec = self._ledger.table(name).spec
            made_of, made = self._stub_specs.get(name, (None, None))
            if made is None or made_of is not spec:
                made = stub_spec(spec)
                self._stub_specs[name] = (spec, made)
            return made
