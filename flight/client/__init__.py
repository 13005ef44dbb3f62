"""The Python client of a queue server: one method a verb, a deadline on every call, our own errors back.

It keeps no state but the connection (`flight.client.connection`), so that it can be shared by threads and thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as paflight

from flight import messages as m
from flight.client.connection import within
from flight.client.keeping import KeepingClient
from flight.client.owners import LOST_WITH
from flight.client.plans import PlansClient
from flight.client.put_stream import PendingPut, PutStream
from flight.client.reading import ReadingClient
from flight.client.results import Lease, PutResult
from flight.client.sharing import SharedMemory
from flight.client.streaming import StreamingClient
from flight.client.tables import TablesClient
from flight.client.take_stream import TakeStream, finished
from flight.data.store import cut
from flight.errors import UnavailableError
from flight.schema import StalenessPolicy, TableSpec
from flight.state.ledger import TakeStatus

__all__ = ["Lease", "PendingPut", "PutResult", "PutStream", "QueueClient", "TakeStream"]


class QueueClient(PlansClient, ReadingClient, StreamingClient, TablesClient, KeepingClient):
    """Connects on first use. `identity` names this process in the server's statistics and errors."""

    # ---- tables -----------------------------------------------------------------------------------------------

    def ping(self) -> None:
        """Return if the server answers."""
        self._act("ping", m.Request(identity=self.identity))

    def create_table(self, spec: TableSpec, *, exist_ok: bool = True) -> None:
        """Create a table; with `exist_ok`, one of the same specification may be there."""
        self._act("create_table", m.from_spec(spec, exist_ok=exist_ok, identity=self.identity))

    def drop_table(self, table: str) -> None:
        """Remove a table and its rows."""
        self._act("drop_table", m.TableRequest(table=table, identity=self.identity), retry=False)

    def list_tables(self) -> list[str]:
        """Return the names of the tables."""
        return self._act("list_tables", m.Request(identity=self.identity))

    def describe(self, table: str) -> TableSpec:
        """Return a table's specification."""
        answer = self._act("describe", m.TableRequest(table=table, identity=self.identity))
        return m.to_spec(msgspec.convert(answer, m.CreateTable))

    def stats(self, table: str | None = None) -> dict[str, Any]:
        """Return statistics: of one table, or of all by name."""
        answer = self._act("stats", m.StatsRequest(table=table, identity=self.identity))
        return answer if table is None else answer[table]

    # ---- rows -------------------------------------------------------------------------------------------------

    def put(
        self,
        table: str,
        data: pa.Table | pa.RecordBatch,
        *,
        writer: str = "",
        deadline_s: float | None = None,
    ) -> PutResult:
        """Add rows, or parts of rows that exist; waits for room. Idempotent by uid, so it is repeated if need be.

        Data are cut into batches of 1 to 4 MB; each batch is added whole or not at all.
        """
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        command = m.PutCommand(table=table, writer=writer, deadline_s=deadline_s, identity=self.identity)
        rows = pa.Table.from_batches([data]) if isinstance(data, pa.RecordBatch) else data
        acks, rest = self._owners.put(command, rows, self._put_once)
        if rest.num_rows or not acks:
            acks += self._connection.repeat(
                f"put into {table}", lambda client: self._put_once(client, command, rest, self._shared)
            )
        self._owners.hear(acks)
        return PutResult(
            num_rows=sum(ack.num_rows for ack in acks),
            num_duplicates=sum(ack.num_duplicates for ack in acks),
            row_ids=tuple(row_id for ack in acks for row_id in ack.row_ids),
        )

    def _put_once(
        self, client: paflight.FlightClient, command: m.PutCommand, rows: pa.Table, seat: SharedMemory
    ) -> list[m.PutAck]:
        shared = seat.put(client, command, rows, within(command.deadline_s))
        if shared is not None:
            return shared
        batches = cut(rows).to_batches() or [pa.RecordBatch.from_pylist([], schema=rows.schema)]
        if len(batches) > 1:
            command = msgspec.structs.replace(command, acks="last")
        descriptor = paflight.FlightDescriptor.for_command(m.encode(command))
        writer, reader = client.do_put(descriptor, batches[0].schema, within(command.deadline_s))
        try:
            for batch in batches:
                writer.write_batch(batch)
            writer.done_writing()
            return [_read_ack(reader)]
        finally:
            # Without close the call stays open; an error of the server surfaces here with its details.
            writer.close()

    def take(
        self,
        table: str,
        consumer: str,
        *,
        max_rows: int,
        min_rows: int = 1,
        columns: Sequence[str] | None = None,
        policy_version: int | None = None,
        lease_s: float = 60.0,
        deadline_s: float | None = None,
        ack: Lease | None = None,
    ) -> Lease:
        """Lease rows for `lease_s` seconds, waiting up to `deadline_s` for `min_rows` of them.

        Mere lack of rows is a status, not an error. Columns default to the consumer's. `policy_version` is the version
        that the caller generates from (tables with tickets) or trains for (the staleness consumer). Repeated if the
        connection drops: rows whose delivery failed come again when their lease expires.

        `ack` finishes the rows of a lease first, in the same call; one without rows is left alone. If the take fails,
        the ack stands.

        Raises:
            LeaseLostError: `ack` took longer than it lasted; nothing was taken.
        """
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        ticket = m.TakeTicket(
            table=table,
            consumer=consumer,
            max_rows=max_rows,
            min_rows=min_rows,
            columns=None if columns is None else list(columns),
            policy_version=policy_version,
            lease_s=lease_s,
            deadline_s=deadline_s,
            ack=finished(ack),
            identity=self.identity,
            endpoints=True,
        )
        rows = self._take_rows(ticket)
        notes = {key.decode(): value.decode() for key, value in (rows.schema.metadata or {}).items()}
        return Lease(
            lease_id=notes["lease_id"],
            table=rows.replace_schema_metadata(None),
            status=msgspec.convert(notes["status"], TakeStatus),
            policy_version=int(notes["policy_version"]),
            max_staleness=int(notes["max_staleness"]) if "max_staleness" in notes else None,
            staleness_policy=msgspec.convert(notes.get("staleness_policy"), StalenessPolicy | None),
        )

    def _take_rows(self, ticket: m.TakeTicket) -> pa.Table:
        """Take; if too few rows are left because a storage server was lost, give them back and take again."""
        where = f"take from {ticket.table}"
        ends_at = time.monotonic() + ticket.deadline_s
        is_over = False
        while True:
            rows = self._get(where, ticket, ticket.deadline_s, retry=True)
            notes = rows.schema.metadata or {}
            num_taken = int(notes[b"num_rows"])
            if rows.num_rows == num_taken or rows.num_rows >= ticket.min_rows:
                return rows
            if rows.num_rows:
                reason = "other rows of the take were lost with a storage server"
                self.nack(ticket.table, ticket.consumer, lease_id=notes[b"lease_id"].decode(), reason=reason)
            if is_over:
                raise UnavailableError(
                    f"{where}: {ticket.min_rows} rows must be left, got {rows.num_rows} of {num_taken}; the others "
                    f"were lost with {notes[LOST_WITH].decode() or 'a storage server'}, these were given back"
                )
            left_s = max(0.0, ends_at - time.monotonic())
            is_over = not left_s
            # What the take was to finish first is finished.
            ticket = msgspec.structs.replace(ticket, deadline_s=left_s, ack=None)

    def ack(
        self,
        table: str,
        consumer: str,
        *,
        lease_id: str | None = None,
        uids: Sequence[str] | None = None,
        step: int | None = None,
    ) -> int:
        """Finish rows: those of a lease, those of `uids` in it, or for a keyed consumer those of `uids`. Idempotent.

        `step` is the optimizer step that used them. Returns how many rows were finished.
        """
        return self._act(
            "ack",
            m.Ack(
                table=table,
                consumer=consumer,
                lease_id=lease_id,
                uids=None if uids is None else list(uids),
                step=step,
                identity=self.identity,
            ),
        )

    def nack(
        self,
        table: str,
        consumer: str,
        *,
        lease_id: str | None = None,
        uids: Sequence[str] | None = None,
        reason: str,
        requeue: bool = True,
        policy_version: int | None = None,
    ) -> int:
        """Give leased rows back, to be delivered again, or with `requeue=False` skip them for good.

        `policy_version`, of the named rows of a table with tickets: work on them was begun from that version and will
        be gone on with, so that their next tickets count from it.
        """
        return self._act(
            "nack",
            m.Nack(
                table=table,
                consumer=consumer,
                lease_id=lease_id,
                uids=None if uids is None else list(uids),
                reason=reason,
                requeue=requeue,
                policy_version=policy_version,
                identity=self.identity,
            ),
        )

    def renew(self, table: str, consumer: str, lease_id: str, lease_s: float) -> None:
        """Let a live lease last `lease_s` seconds from now."""
        self._act(
            "renew",
            m.Renew(
                table=table, consumer=consumer, lease_id=lease_id, lease_s=lease_s, identity=self.identity
            ),
        )

    def void(self, member: str) -> int:
        """Give back all rows that a member (a client's `identity`) holds: it is gone. Return how many. Idempotent."""
        return self._act("void", m.VoidRequest(member=member, identity=self.identity))

    # ---- course of the run ------------------------------------------------------------------------------------

    def seal(self, table: str, expected_rows: int | None = None) -> None:
        """Declare that no new rows will come, or none beyond `expected_rows` in all."""
        self._act("seal", m.Seal(table=table, expected_rows=expected_rows, identity=self.identity))

    def announce(self, table: str, policy_version: int) -> None:
        """Set the policy version of a table with a staleness bound; it never goes back."""
        self._act("announce", m.Announce(table=table, policy_version=policy_version, identity=self.identity))

    def set_max_staleness(self, table: str, max_staleness: int) -> None:
        """Change the staleness bound of a table while it is in use."""
        self._act(
            "set_max_staleness",
            m.SetMaxStaleness(table=table, max_staleness=max_staleness, identity=self.identity),
        )


def _read_ack(reader: paflight.FlightMetadataReader) -> m.PutAck:
    data = reader.read()
    if data is None:
        raise UnavailableError("put: it must be acknowledged, got the end of the stream")
    return m.decode(memoryview(data), m.PutAck, what="put acknowledgement")
