"""Is there room for a put? If not, the producer waits; if none comes, the error says who is slow.

Room is bounded by the table's rows and bytes and, if the server has a bound, by the bytes of all tables together. Of
the server's bytes one half is for whoever comes; of the other half each table has an equal share that no other can use
up, so that a table at the start of a run's chain of tables never starves those that would empty it. Dead letters that
nobody else needs make room first. What must leave memory for disk is written here too, outside the lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import structlog

from flight.broker.core import BrokerCore, Wait
from flight.data.batches import CheckedBatch
from flight.data.spill import FILE_BYTES, RETRY_S
from flight.data.store import Chunk, ColumnStore
from flight.errors import CapacityError, DeadlineExceededError, SchemaMismatchError
from flight.storage.stubs import Stub
from flight.table import TableState

LOG = structlog.get_logger("flight.broker")


class BrokerRoom(BrokerCore):
    """Admission of rows."""

    def _wait_for_room(
        self, name: str, checked: CheckedBatch, num_bytes: int, wait: Wait, stub: Stub | None = None
    ) -> TableState:
        """Wait until the new rows fit. The rest of an open group and parts of rows that exist always fit.

        Values that a storage server has count for the table, not for this server.
        """
        remote_bytes = stub.num_bytes if stub is not None else 0
        while True:
            if stub is not None:
                self._owners.admit(stub)
            table = self._ledger.table(name)
            needed = table.room_needed(checked.uids, checked.group_ids)
            if checked.versions is None and table.spec.staleness is not None and table.num_new(checked.uids):
                raise SchemaMismatchError(
                    f"put into {name}: the first part of a row must have policy_version_start, got columns "
                    f"{checked.data.schema.names} for a uid that is not in the table"
                )
            if not needed:
                return table
            self._check_batch_fits(table, num_bytes, remote_bytes)
            lack = self._lack(table, needed, num_bytes, remote_bytes)
            while lack and self._ledger.discard_oldest_dead(name):
                self._after(name)
                lack = self._lack(table, needed, num_bytes, remote_bytes)
            if not lack:
                return table
            self._num_waiting_for_server += lack != "table"
            try:
                has_time = self._wait(name, wait)
            finally:
                self._num_waiting_for_server -= lack != "table"
            if not has_time:
                raise DeadlineExceededError(self._no_room(table, needed, num_bytes + remote_bytes, lack))

    def _check_batch_fits(self, table: TableState, num_bytes: int, remote_bytes: int) -> None:
        for what, most, wanted in (
            ("capacity_bytes", table.spec.capacity_bytes, num_bytes + remote_bytes),
            ("the server's capacity_bytes", self.capacity_bytes, num_bytes),
        ):
            if most is not None and wanted > most:
                raise CapacityError(
                    f"put into {table.spec.name}: one batch must be at most {what} {most}, got {wanted}; "
                    "cut the batch or raise the capacity"
                )

    def _lack(self, table: TableState, needed: int, num_bytes: int, remote_bytes: int) -> str:
        """Return what has no room for a put: "table", "server", "disk", or an empty string."""
        store = self._stores[table.spec.name]
        free_bytes = table.spec.capacity_bytes - self._table_bytes(table.spec.name)
        if (
            needed > table.room
            or needed + table.num_held > table.spec.capacity_rows
            or num_bytes + remote_bytes > free_bytes
        ):
            return "table"
        if num_bytes > self._server_room(table.spec.name):
            return "server"
        if table.spec.spill and store.disk_retry_at is not None:
            held = store.nbytes - store.disk_nbytes
            if held and held + num_bytes > table.spec.memory_bytes:
                if self.clock() < store.disk_retry_at:
                    return "disk"
                store.disk_retry_at = self.clock() + RETRY_S
        return ""

    def _table_bytes(self, name: str) -> int:
        return self._stores[name].nbytes + self._owners.remote_bytes.get(name, 0)

    def _server_room(self, name: str) -> float:
        """Return the bytes that a table may add, so that each other table can still have its share."""
        if self.capacity_bytes is None:
            return float("inf")
        share = self.capacity_bytes / 2 / len(self._stores)
        others = sum(max(store.nbytes, share) for each, store in self._stores.items() if each != name)
        return self.capacity_bytes - others - self._stores[name].nbytes

    def _no_room(self, table: TableState, num_rows: int, num_bytes: int, lack: str) -> str:
        where = (
            f"put into {table.spec.name}: room for {num_rows} rows and {num_bytes} bytes must come before the "
            "deadline"
        )
        if lack == "table":
            free_bytes = table.spec.capacity_bytes - self._table_bytes(table.spec.name)
            return f"{where}, got {table.room} rows and {free_bytes} bytes; {_who_is_behind(table)}"
        if lack == "disk":
            return (
                f"{where}, got none in memory_bytes {table.spec.memory_bytes}, and the disk takes no more; "
                f"{_who_is_behind(table)}"
            )
        largest = max(self._stores, key=lambda name: self._stores[name].nbytes)
        free_bytes = max(0, int(self._server_room(table.spec.name)))
        return (
            f"{where}, got {free_bytes} of the server's {self.capacity_bytes} bytes; "
            f"table {largest!r} holds {self._stores[largest].nbytes} of them: "
            f"{_who_is_behind(self._ledger.table(largest))}"
        )

    # ---- disk -------------------------------------------------------------------------------------------------

    def _move_to_disk(self, store: ColumnStore, chunks: Sequence[Chunk]) -> None:
        """Write chunks that `ColumnStore.overflow` chose. Called without the lock; a full disk makes producers wait."""
        if self._spill is None:
            return
        for group in _by_file(chunks):
            originals = [chunk.batch for chunk in group]
            mapped: Sequence[object] = [None] * len(group)
            retry_at = None
            try:
                mapped = self._spill.write(originals)
            except OSError as error:
                retry_at = self.clock() + RETRY_S
                LOG.warning(
                    "cannot write to the spill directory", path=str(self._spill.path), error=str(error)
                )
            with self._lock:
                store.disk_retry_at = retry_at
                for chunk, original, batch in zip(group, originals, mapped, strict=True):
                    store.moved(chunk, original, batch)


def _by_file(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Group chunks of the same schema up to the size of a file, in order."""
    group: list[Chunk] = []
    for chunk in chunks:
        is_full = sum(each.nbytes for each in group) >= FILE_BYTES
        if group and (is_full or not group[0].batch.schema.equals(chunk.batch.schema)):
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group


def _who_is_behind(table: TableState) -> str:
    unfinished = {consumer.name: table.num_unfinished(consumer.name) for consumer in table.spec.consumers}
    if not unfinished and table.unreferenced is not None:
        return (
            f"the table has no consumer, its rows stay while others refer to them; {len(table.unreferenced)} of "
            f"{len(table.rows)} wait for the first that does"
        )
    if not unfinished:
        return "the table has no consumer, its rows stay until it is dropped"
    slowest = max(unfinished, key=lambda name: unfinished[name])
    held = ""
    if slowest in table.cursors:
        members = sorted({lease.member for lease in table.cursors[slowest].leases.values()})
        held = f", {table.cursors[slowest].num_leased()} of them leased by {members}" if members else ""
    return f"consumer {slowest!r} is furthest behind with {unfinished[slowest]} rows to finish{held}"
