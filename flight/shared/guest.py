"""The client's side of shared memory: joins a server of this host, writes what it puts, maps what it takes.

What was taken lies in memory that is mapped read-only: a write to it ends the process (SIGSEGV), as torch does not
know about read-only arrays; copy before changing in place. It is valid as long as an Arrow, numpy or torch view of it
is alive, also after the client is closed and the server is gone.
"""

from __future__ import annotations

import itertools
import mmap
import os
import select
import socket
import threading
import weakref
from collections import deque
from contextlib import suppress

import msgspec
import pyarrow as pa
import structlog

from flight import messages as m
from flight.errors import UnavailableError
from flight.shared import layout, wire

ANSWER_S = 10.0
"""Seconds that a server may take to answer on the socket."""

LOG = structlog.get_logger("flight.shared.guest")


class _Hold:
    """Lives as long as a view of a grant does; keeps the mapping."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: pa.Buffer) -> None:
        self.memory = memory


class Guest:
    """A client's seat at the arena of one server. Thread-safe; its socket closes once no view needs it any more.

    Raises:
        OSError: there is no such server here, or it is another user's.
    """

    def __init__(self, offer: m.SharedMemoryOffer) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._grants = itertools.count(1)
        self._blocks = itertools.count(1)
        self._unsent: deque[wire.Free] = deque()
        self._has_warned = False
        self._is_broken = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        weakref.finalize(self, self._socket.close)
        self._socket.settimeout(ANSWER_S)
        self._socket.connect(offer.socket_path)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        if not wire.is_same_user(wire.peer_user(self._socket)):
            raise PermissionError(f"shared memory: {offer.socket_path} must be of this user")
        self._socket.send(msgspec.json.encode(wire.Join(ticket=offer.ticket)))
        packet, descriptors, _, _ = socket.recv_fds(self._socket, wire.MAX_MESSAGE_BYTES, 1)
        welcome = wire.decode(packet, wire.Welcome)
        if welcome is None or not descriptors:
            raise ConnectionError("shared memory: the server must send its arena first")
        self.connection: str = welcome.connection
        self._arena_bytes: int = welcome.arena_bytes
        try:
            self._readable = pa.py_buffer(mmap.mmap(descriptors[0], welcome.arena_bytes, prot=mmap.PROT_READ))
            self._writable = memoryview(mmap.mmap(descriptors[0], welcome.arena_bytes))
        finally:
            os.close(descriptors[0])

    @property
    def is_connected(self) -> bool:
        """Return whether the server is still there."""
        # The server says nothing unasked, so anything to read is the end; a call in progress has the lock.
        with self._lock:
            return not self._is_broken and not self._poll.poll(0)

    def new_grant(self) -> int:
        """Return a number for a grant."""
        for _ in range(len(self._unsent)):  # Once each: what cannot be sent yet comes back into the queue.
            with suppress(IndexError):
                self._say(self._unsent.popleft())
        return next(self._grants)

    def new_block(self) -> int:
        """Return the first of `wire.BLOCK_GRANTS` numbers for grants that the server chooses."""
        return next(self._blocks) * wire.BLOCK_GRANTS

    def free(self, grant: int, until: int | None = None) -> None:
        """Tell the server that a grant, or a range, is over. Takes no lock: it runs wherever the last view dies."""
        self._say(wire.Free(grant=grant, until=until))

    def _say(self, message: wire.Free) -> None:
        if os.getpid() != self._pid:
            return
        try:
            # Not send(), which waits until there is room: the descriptor itself does not block.
            os.write(self._socket.fileno(), msgspec.json.encode(message))
        except BlockingIOError:
            self._unsent.append(message)
        except OSError:
            return  # The server is gone, and its grants with it.

    # ---- rows in ----------------------------------------------------------------------------------------------

    def open(self, table: pa.Table, grant: int) -> pa.Table:
        """Return the table that an answer stands for; one that is not shared stays as it is."""
        packed = (table.schema.metadata or {}).get(b"shared")
        if packed is None:
            return table
        message = msgspec.json.decode(packed, type=layout.SharedTable)
        schema = pa.ipc.read_schema(pa.py_buffer(message.arrow_schema))
        return self.rebuild(message, schema, table, grant)

    def rebuild(
        self, message: layout.SharedTable, schema: pa.Schema, rest: pa.Table | None, grant: int
    ) -> pa.Table:
        """Return the table of a schema that a message stands for; `rest` has the columns that are not shared."""
        hold = _Hold(self._readable)
        weakref.finalize(hold, self.free, grant).atexit = False

        def buffer_at(offset: int, size_bytes: int) -> pa.Buffer:
            if not 0 <= offset <= self._arena_bytes - size_bytes:
                raise UnavailableError(f"shared memory: place must be in the arena, got {offset}")
            return pa.foreign_buffer(self._readable.address + offset, size_bytes, hold)

        if message.rest is not None:
            rest = pa.ipc.open_stream(buffer_at(*message.rest)).read_all()
        return pa.Table.from_arrays(
            [
                layout.rebuild(message.columns[field.name], field.type, buffer_at)
                if rest is None or field.name in message.columns
                else rest.column(field.name)
                for field in schema
            ],
            schema=schema,
        )

    # ---- rows out ---------------------------------------------------------------------------------------------

    def write(self, batches: list[pa.RecordBatch], grant: int) -> list[int] | None:
        """Write each batch into a slot of its own and return the slots; None if there is no room."""
        sizes = [layout.stream_bytes(batch) for batch in batches]
        slots = self._allocate(sizes, grant)
        if not slots:
            if not self._has_warned:
                self._has_warned = True
                LOG.warning(
                    "shared memory is full, rows go over the socket; a larger --shared-memory-bytes helps",
                    wanted_bytes=sum(sizes),
                    arena_bytes=self._arena_bytes,
                )
            return None
        for batch, size_bytes, (_, offset) in zip(batches, sizes, slots, strict=True):
            place = self._writable[offset : offset + size_bytes]
            layout.copy_stream(batch, pa.py_buffer(place))
        return [slot_id for slot_id, _ in slots]

    def _allocate(self, sizes_bytes: list[int], grant: int) -> list[tuple[int, int]]:
        with self._lock:
            if self._is_broken or len(sizes_bytes) > wire.MAX_SLOTS:
                return []
            try:
                self._socket.send(msgspec.json.encode(wire.Allocate(grant=grant, sizes_bytes=sizes_bytes)))
                answer = wire.decode(self._socket.recv(wire.MAX_MESSAGE_BYTES), wire.Allocated)
            except OSError:
                # An answer that comes late must not be taken for the next one's. The socket stays open, as the
                # server would free what is still looked at.
                self._is_broken = True
                return []
        return answer.slots if answer is not None else []
