"""What every verb of the client needs: who asks, the connection, one JSON action, one stream of rows. No verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import msgspec
import pyarrow as pa
import pyarrow.flight as paflight

from flight import messages as m
from flight.client.connection import Connection, within
from flight.client.credentials import Credentials
from flight.client.owners import Owners
from flight.client.patience import PATIENCE_S
from flight.client.sharing import SharedMemory


class ClientCalls:
    """Connects on first use. `identity` names this process in the server's statistics and errors.

    `credentials` is a directory of what to show to the server and what to trust, see `flight.client.credentials`.

    With `shared_memory`, tables that lie in the memory of a server on this host are mapped, not copied: they are
    read-only, and valid as long as any view of them is alive. `patience_s` is how long a call waits for a server that
    is away, beside its own deadline: a client that has it lives through a restart of the server.
    """

    def __init__(
        self,
        uri: str,
        *,
        identity: str,
        deadline_s: float = 30.0,
        shared_memory: bool = True,
        patience_s: float = PATIENCE_S,
        credentials: Path | None = None,
    ) -> None:
        self.uri = uri
        self.identity = identity
        self.deadline_s = deadline_s
        shown = None if credentials is None else Credentials.load(credentials)
        self._connection = Connection(uri, shown, patience_s=patience_s)
        self._shared = SharedMemory(identity, is_on=shared_memory)
        self._owners = Owners(
            identity, shared_memory=shared_memory, credentials=shown, act=self._act, read=self._read_whole
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a later call opens a new one. Idempotent."""
        self._owners.close()
        self._shared.close()
        self._connection.close()

    def _act(
        self, name: str, request: m.Request, *, retry: bool = True, deadline_s: float | None = None
    ) -> Any:
        action = paflight.Action(name, m.encode(request))
        options = within(self.deadline_s if deadline_s is None else deadline_s)

        def once(client: paflight.FlightClient) -> Any:
            bodies = [result.body.to_pybytes() for result in client.do_action(action, options)]
            return msgspec.json.decode(bodies[0])

        return self._connection.repeat(name, once, retry=retry)

    def _get(self, where: str, ticket: m.GetTicket, deadline_s: float, *, retry: bool) -> pa.Table:
        def once(client: paflight.FlightClient) -> pa.Table:
            return self._shared.get(client, ticket, within(deadline_s))

        rows = self._connection.repeat(where, once, retry=retry)
        return self._owners.complete(ticket, rows, deadline_s)

    def _read_whole(self, ticket: m.ReadTicket) -> pa.Table:
        """Return rows that the server fetches itself if they lie elsewhere."""
        return self._get(f"read {ticket.table}", ticket, self.deadline_s, retry=True)
