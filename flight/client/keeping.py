"""The client's verbs about what outlives a server: the journal's statistics, kept checkpoints, and snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow.flight as paflight

from flight import messages as m
from flight.client.calls import ClientCalls
from flight.client.connection import within


class KeepingClient(ClientCalls):
    """What concerns all tables at once."""

    def journal(self) -> dict[str, Any] | None:
        """Return statistics of the server's journal, None if it has none."""
        return self._act("journal", m.Request(identity=self.identity))

    def checkpoint_prepare(self, checkpoint_id: str) -> int:
        """Keep all tables as they are now, until released; return the last decision that is in it.

        Make your own files durable next, then call `checkpoint_commit`. A call can be repeated until then.

        Raises:
            InvalidRequestError: the server has no journal, a committed checkpoint has that name, or too many are kept.
            JournalFullError: there is no room for it.
        """
        return self._checkpoint("prepare", checkpoint_id)

    def checkpoint_commit(self, checkpoint_id: str) -> None:
        """Note for good that what belongs to a kept checkpoint is durable. Idempotent.

        Raises:
            InvalidRequestError: there is none of that name.
        """
        self._checkpoint("commit", checkpoint_id)

    def checkpoint_release(self, checkpoint_id: str) -> bool:
        """Let a kept checkpoint go; return whether there was one of that name."""
        return self._checkpoint("release", checkpoint_id)

    def checkpoint_rewind(self, checkpoint_id: str) -> int:
        """Let all tables be what they were at a kept checkpoint, which stays; all leases are void.

        Raises:
            InvalidRequestError: there is none of that name.
            JournalDamagedError: it is not as it was written; nothing has changed.
        """
        return self._checkpoint("rewind", checkpoint_id, retry=False)

    def checkpoints(self) -> list[dict[str, Any]]:
        """Return the kept checkpoints, oldest first: checkpoint_id, status ("prepared", "committed"), decision."""
        return self._act("checkpoints", m.Request(identity=self.identity))

    def _checkpoint(self, verb: str, checkpoint_id: str, *, retry: bool = True) -> Any:
        request = m.CheckpointRequest(checkpoint_id=checkpoint_id, identity=self.identity)
        return self._act(f"checkpoint_{verb}", request, retry=retry)

    def snapshot(self, *, deadline_s: float | None = None) -> Iterator[bytes]:
        """Yield the bytes of a snapshot file of all tables, as `python -m flight restore` reads it."""
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        ticket = m.SnapshotTicket(identity=self.identity)

        def begin(client: paflight.FlightClient) -> paflight.FlightStreamReader:
            return client.do_get(paflight.Ticket(m.encode(ticket)), within(deadline_s))

        reader = self._connection.repeat("snapshot", begin, retry=True)
        try:
            while (
                piece := self._connection.repeat("snapshot", lambda _: _next(reader), retry=False)
            ) is not None:
                yield piece
        finally:
            reader.cancel()


def _next(reader: paflight.FlightStreamReader) -> bytes | None:
    try:
        return b"".join(reader.read_chunk().data.column(0).to_pylist())
    except StopIteration:
        return None
