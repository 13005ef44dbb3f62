"""The client's open streams: puts and takes without a call for each. Rows pushed are in `flight.client.reading`."""

from __future__ import annotations

from collections.abc import Sequence

from flight import stream_messages as sm
from flight.client.calls import ClientCalls
from flight.client.open_stream import OpenStream
from flight.client.put_stream import PutStream
from flight.client.take_stream import TakeStream


class StreamingClient(ClientCalls):
    """Streams open when they are first used, again after a break, and rest when nobody uses them."""

    def open_put(self, table: str, *, writer: str = "", deadline_s: float | None = None) -> PutStream:
        """Return a stream of puts into a table; use it in a `with` block. See `put`.

        `deadline_s` (default: this client's) is how long a put without one of its own waits for room.
        """
        request = sm.PutStream(table=table, writer=writer, identity=self.identity)
        stream = OpenStream(self._connection, request, f"put into {table}")
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        return PutStream(stream, self._shared, request, deadline_s=deadline_s)

    def open_take(
        self,
        table: str,
        consumer: str,
        *,
        columns: Sequence[str] | None = None,
        deadline_s: float | None = None,
    ) -> TakeStream:
        """Return a stream of takes of the same columns by one consumer; use it in a `with` block. See `take`.

        `deadline_s` (default: this client's) is how long a take without one of its own waits for rows.
        """
        request = sm.TakeStream(
            table=table,
            consumer=consumer,
            columns=None if columns is None else list(columns),
            identity=self.identity,
        )
        stream = OpenStream(self._connection, request, f"take from {table}")
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        return TakeStream(stream, self._shared, request, deadline_s=deadline_s)
