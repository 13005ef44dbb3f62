"""The client's streams: read and SQL, statistics as they change, and rows pushed. Taking is in `flight.client`."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.flight as paflight

from flight import messages as m
from flight import stream_messages as sm
from flight.client.calls import ClientCalls
from flight.client.connection import TRANSFER_S, within
from flight.client.lasting import LastingSubscription
from flight.client.subscription import Subscription

DEFAULT_CREDIT_LEASES = 2
"""Leases of full size that a subscriber without a credit of its own lets come."""

MAX_WATCH_S = 3600.0
"""A stream of statistics lasts an hour at most; `watch` opens the next by itself."""


class ReadingClient(ClientCalls):
    """Nothing here consumes a row, except `subscribe`, which has rows pushed that the caller finishes."""

    def read(
        self,
        table: str,
        *,
        columns: Sequence[str] | None = None,
        uids: Sequence[str] | None = None,
        max_rows: int | None = None,
        newest: bool = False,
        row_ids: tuple[int | None, int | None] | None = None,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 - Arrow and SQL call it so
        state: Literal["dead"] | None = None,
        consumer: str | None = None,
    ) -> pa.Table:
        """Look at rows without consuming them: all, those of `uids` that are there, or the first (last) `max_rows`.

        `state="dead"` looks at dead letters only, of one consumer or of all, with the columns dead_consumer,
        dead_attempts and dead_reason.

        `row_ids` is a range with both ends, None for an open one. `filter` is `{"column": "reward", "op": ">=",
        "value": 0.5}`, or a combination of such by and, or, not; see `flight.data.filters`.
        """
        ticket = m.ReadTicket(
            table=table,
            columns=None if columns is None else list(columns),
            uids=None if uids is None else list(uids),
            row_ids=None if row_ids is None else m.RowRange(first=row_ids[0], last=row_ids[1]),
            filter=None if filter is None else dict(filter),
            max_rows=max_rows,
            newest=newest,
            state=state,
            consumer=consumer,
            identity=self.identity,
            endpoints=True,
        )
        return self._get(f"read {table}", ticket, self.deadline_s, retry=True)

    def sql(self, query: str, *, max_rows: int = 100_000, deadline_s: float | None = None) -> pa.Table:
        """Return the answer to one SELECT over the tables as they are now; nothing is consumed.

        The server needs the extra `sql` (DuckDB). Only the columns that the query names are looked at.

        Raises:
            InvalidRequestError: it is not one SELECT over tables that are there, or has more than `max_rows` rows.
            DeadlineExceededError: it takes too long.
        """
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        ticket = m.SqlTicket(query=query, max_rows=max_rows, deadline_s=deadline_s, identity=self.identity)
        return self._get("sql", ticket, deadline_s, retry=True)

    def watch(
        self,
        *,
        interval_s: float = 1.0,
        tables: Sequence[str] | None = None,
        deadline_s: float | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Yield statistics every `interval_s`: one dictionary a table; those of one tick share `time`.

        Keys: time (UTC), table, rows, bytes, put_per_s, consumers (a list of name, ready, leased, taken_per_s,
        acked_per_s), policy_version, max_staleness and outstanding (None without a staleness bound).
        Ends after `deadline_s`; without one, when the caller closes the iterator.
        """
        ticks = self.watch_ticks(interval_s=interval_s, tables=tables, deadline_s=deadline_s)
        with closing(ticks):
            for tick in ticks:
                yield from tick

    def watch_ticks(
        self,
        *,
        interval_s: float = 1.0,
        tables: Sequence[str] | None = None,
        deadline_s: float | None = None,
    ) -> Generator[list[dict[str, Any]]]:
        """Yield what `watch` yields, the tables of one tick together."""
        ends_at = None if deadline_s is None else time.monotonic() + deadline_s
        while (left_s := MAX_WATCH_S if ends_at is None else ends_at - time.monotonic()) > 0:
            ticket = m.WatchTicket(
                tables=None if tables is None else list(tables),
                interval_s=interval_s,
                deadline_s=min(left_s, MAX_WATCH_S),
                identity=self.identity,
            )
            yield from self._watch_once(ticket)

    def _watch_once(self, ticket: m.WatchTicket) -> Iterator[list[dict[str, Any]]]:
        def begin(client: paflight.FlightClient) -> paflight.FlightStreamReader:
            return client.do_get(paflight.Ticket(m.encode(ticket)), within(ticket.deadline_s))

        reader = self._connection.repeat("watch", begin, retry=True)
        try:
            while (
                batch := self._connection.repeat("watch", lambda _: _tick(reader, ticket), retry=False)
            ) is not None:
                yield batch.to_pylist()
        finally:
            # Tells the server to stop; a stream that is only dropped goes on until its next tick.
            reader.cancel()

    def subscribe(
        self,
        table: str,
        consumer: str,
        *,
        columns: Sequence[str] | None = None,
        max_rows: int = 64,
        min_rows: int = 1,
        credit_rows: int | None = None,
        credit_bytes: int | None = None,
        lease_s: float = 60.0,
        idle_deadline_s: float | None = None,
        policy_version: int | None = None,
        heartbeat_s: float = 5.0,
    ) -> LastingSubscription:
        """Have leases of `min_rows` to `max_rows` rows pushed as soon as there are rows; use it in a `with` block.

        The credit bounds what is on its way, waits here, or is neither acked nor nacked: `credit_rows` exactly (default
        two full leases), `credit_bytes` to within one lease. `idle_deadline_s` (default: this client's deadline) is
        how long the iterator waits for a lease. When the stream breaks, another is opened while this client is patient;
        leases of the broken one have gone back. For the rest see `take`.

        Raises:
            InvalidRequestError: there is no such consumer or column, or a limit is out of range.
        """
        if credit_rows is None and credit_bytes is None:
            credit_rows = DEFAULT_CREDIT_LEASES * max_rows
        request = sm.Subscribe(
            table=table,
            consumer=consumer,
            columns=None if columns is None else list(columns),
            max_rows=max_rows,
            min_rows=min_rows,
            credit_rows=credit_rows,
            credit_bytes=credit_bytes,
            lease_s=lease_s,
            policy_version=policy_version,
            heartbeat_s=heartbeat_s,
            identity=self.identity,
        )
        idle_s = self.deadline_s if idle_deadline_s is None else idle_deadline_s

        def open_stream(adopted: int | None) -> Subscription:
            chosen = request if adopted is None else msgspec.structs.replace(request, policy_version=adopted)
            return Subscription(self._connection, self._shared, chosen, idle_deadline_s=idle_s)

        patience_s = self._connection.patience_s
        return LastingSubscription(open_stream, idle_deadline_s=idle_s, patience_s=patience_s)


def _tick(reader: paflight.FlightStreamReader, ticket: m.WatchTicket) -> pa.RecordBatch | None:
    """Read the next tick, None at the end; a silent server is given up."""
    watchdog = threading.Timer(ticket.interval_s + TRANSFER_S, reader.cancel)
    watchdog.daemon = True
    watchdog.start()
    try:
        return reader.read_chunk().data
    except StopIteration:
        return None
    finally:
        watchdog.cancel()
