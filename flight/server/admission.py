"""Admission of calls: the server asks here about each request, and hears what its caller may see. It guards nothing
itself (`flight.security.guard` does), and without a guard it lets everybody see everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow.flight as paflight

from flight import messages as m
from flight.security.access import ALL_TABLES, Right
from flight.security.guard import Admitted, Guard
from flight.security.rights import tables_of, tables_referred_to

T = TypeVar("T")


class Admission:
    """Admits calls to one server, whose tables are those that `list_tables` returns. Thread-safe."""

    def __init__(self, guard: Guard | None, list_tables: Callable[[], Sequence[str]]) -> None:
        self._guard = guard
        self._list_tables = list_tables

    def admit(self, context: paflight.ServerCallContext, request: Any, name: str = "") -> Caller:
        """Return who makes a call, if it is theirs to make; `name` is the action's, else the message's class.

        The request is changed to what it may be: the identity belongs to the principal, and answers in shared memory
        are for those who may map it.

        Raises:
            AccessDeniedError: they may not.
            OverloadedError: they call more often than they may.
        """
        if self._guard is None:
            return Caller(context, None, self._list_tables)
        name = name or type(request).__name__
        admitted = self._guard.admit(
            context, name, tables_of(name, request), referred=tables_referred_to(request)
        )
        principal = admitted.principal
        own_name = f"{principal.name}/{request.identity}"
        request.identity = own_name if request.identity else principal.name
        if isinstance(request, m.VoidRequest) and not principal.may("admin", ALL_TABLES):
            request.member = f"{principal.name}/{request.member}"
        if not principal.shares_memory and hasattr(request, "shared"):
            request.shared = None
        return Caller(context, admitted, self._list_tables)


class Caller:
    """Who makes a call, in the place of its context: there until the connection ends or the right is taken away."""

    def __init__(
        self,
        context: paflight.ServerCallContext,
        admitted: Admitted | None,
        list_tables: Callable[[], Sequence[str]],
    ) -> None:
        self._context = context
        self._admitted = admitted
        self._list_tables = list_tables

    def peer(self) -> str:
        """Return the caller's address as gRPC writes it."""
        return self._context.peer()

    def is_cancelled(self) -> bool:
        """Return whether nobody may hear the answer any more."""
        return self._context.is_cancelled() or (self._admitted is not None and self._admitted.is_revoked())

    def visible(self, right: Right, tables: Sequence[str]) -> Sequence[str]:
        """Return those of `tables` on which the caller has a right."""
        if self._admitted is None:
            return tables
        return self._admitted.principal.visible(right, tables)

    def memory(self, host: T | None) -> T | None:
        """Return the shared memory, None for a caller who may not map it."""
        return host if self._admitted is None or self._admitted.principal.shares_memory else None

    def reader(self, reader: paflight.MetadataRecordBatchReader) -> paflight.MetadataRecordBatchReader:
        """Return a reader that checks with every message that the caller still may."""
        return reader if self._admitted is None else _CheckingReader(reader, self._admitted.check)

    def answer(self, actions: Mapping[str, Callable[[Any], Any]], name: str, request: Any) -> Any:
        """Do an action, and return what the caller may see of its answer."""
        if self._admitted is None:
            return actions[name](request)
        if name == "ping":
            num_tables = len(self.visible("look", self._list_tables()))
            return actions[name](request) | {"tables": num_tables}
        if name == "shared_memory":
            return actions[name](request) if self._admitted.principal.shares_memory else None
        if name == "list_tables":
            return self.visible("look", actions[name](request))
        answer = actions[name](request)
        if name == "stats":
            return {table: answer[table] for table in self.visible("read", list(answer))}
        return answer


class _CheckingReader:
    """Hands on what a client sends as long as it may send it."""

    def __init__(self, reader: paflight.MetadataRecordBatchReader, check: Callable[[], None]) -> None:
        self._reader = reader
        self._check = check

    def read_chunk(self) -> paflight.FlightStreamChunk:
        chunk = self._reader.read_chunk()
        self._check()
        return chunk

    def __iter__(self) -> Iterator[paflight.FlightStreamChunk]:
        while True:
            try:
                chunk = self.read_chunk()
            except StopIteration:
                return
            yield chunk
