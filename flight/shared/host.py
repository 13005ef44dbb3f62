"""The server's side of shared memory: owns the arena, lets clients of this host and user in, and keeps their grants.

A client's grants end when it says so or when its socket closes, which it does however the client ends. What the
server's own tables point at is held until the last Arrow array of it is gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import shutil
import socket
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import structlog

from flight import messages as m
from flight.data.store import joined
from flight.errors import InvalidRequestError, UnavailableError
from flight.shared import layout, wire
from flight.shared.arena import Arena, Slot

DEFAULT_ARENA_BYTES = 1 << 30
MAX_TICKETS = 1024
"""Tickets that nobody has used yet; the oldest give way."""

JOIN_S = 5.0
"""Seconds that a new connection has to show its ticket."""

PREFAULT_STEP_BYTES = 32 << 20
MIN_PREFAULT_BYTES = 64 << 20

LOG = structlog.get_logger("flight.shared.host")


class _Guest:
    """One client. `grants` are slots by grant; `ended` and `ended_blocks` were over before they came to be."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.name = secrets.token_hex(16)
        self.grants: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.ended_blocks: list[range] = []

    def has_used(self, grant: int) -> bool:
        """Return whether a number must not come to be a grant, now or any more."""
        is_over = grant in self.ended or any(grant in block for block in self.ended_blocks)
        return is_over or grant in self.grants


class _Hold:
    """Lives as long as an Arrow buffer of a slot does."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: pa.Buffer) -> None:
        self.memory = memory


class SharedMemoryHost:
    """Serves from construction until `close`. Pages are made ahead of use, to a few times what was ever in use.

    Raises:
        OSError: the host gives no shared memory, or no directory of this user's own.
    """

    def __init__(self, arena_bytes: int = DEFAULT_ARENA_BYTES, *, root: Path | None = None) -> None:
        self._arena = Arena(arena_bytes)
        self._lock = threading.Lock()
        self._guests: dict[str, _Guest] = {}
        self._tickets: deque[str] = deque(maxlen=MAX_TICKETS)
        self._let_go: deque[int] = deque()
        self._has_warned = False
        self._made_bytes = 0
        self._is_closed = False
        self._descriptor = _make_arena(self._arena.capacity_bytes)
        # Not in close(): a thread may still be making pages of it.
        weakref.finalize(self, os.close, self._descriptor)
        self._memory = mmap.mmap(self._descriptor, self._arena.capacity_bytes)
        self._buffer = pa.py_buffer(self._memory)
        self._directory, self._owner_lock = _make_directory(root or _default_root())
        self.path = self._directory / "socket"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="shared-memory", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more. What clients and tables have mapped stays readable."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._owner_lock.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        with self._lock:
            # Slots of who is hung up first must not go to who is hung up last: there may still be views of them.
            self._is_closed = True
            guests = list(self._guests.values())
        for guest in guests:
            _hang_up(guest.connection)

    def offer(self) -> m.SharedMemoryOffer:
        """Return where a client of this host may connect and its ticket, and what the arena holds now."""
        ticket = secrets.token_hex(16)
        with self._lock:
            self._catch_up()
            self._tickets.append(ticket)
            return m.SharedMemoryOffer(
                boot_id=wire.boot_id(),
                socket_path=str(self.path),
                ticket=ticket,
                arena_bytes=self._arena.capacity_bytes,
                used_bytes=self._arena.used_bytes,
                num_slots=len(self._arena),
                num_clients=len(self._guests),
            )

    # ---- rows out ---------------------------------------------------------------------------------------------

    def share(self, table: pa.Table, wanted: m.SharedRef) -> pa.Table | None:
        """Return what to send to a client when most of a table is shared, None if the table is to be sent."""
        found = self._place(table, wanted, is_whole=False)
        if found is None:
            return None
        message, rest = found
        message.arrow_schema = table.schema.serialize().to_pybytes()
        notes = dict(table.schema.metadata or {}) | {b"shared": msgspec.json.encode(message)}
        return rest.combine_chunks().replace_schema_metadata(notes)

    def place(self, table: pa.Table, wanted: m.SharedRef) -> layout.SharedTable | None:
        """Return what stands for a whole table on a stream that knows its schema; None if it is to be sent."""
        found = self._place(table, wanted, is_whole=True)
        return found[0] if found is not None else None

    def _place(
        self, table: pa.Table, wanted: m.SharedRef, *, is_whole: bool
    ) -> tuple[layout.SharedTable, pa.Table] | None:
        """Find or make the places of a table; also return the columns that are too small for one, unless `is_whole`."""
        if not table.num_rows or table.get_total_buffer_size() < wire.SMALL_BYTES:
            return None
        sizes = {name: column.nbytes for name, column in zip(table.column_names, table.columns, strict=True)}
        if sum(sizes.values()) < wire.SMALL_BYTES:
            return None
        columns: dict[str, list[layout.Piece]] = {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            if sizes[name] >= wire.SMALL_BYTES:
                pieces = layout.describe(column, self._buffer.address, self._arena.capacity_bytes)
                if pieces is not None:
                    columns[name] = pieces
        rest = joined(table.select([name for name in table.column_names if name not in columns]))
        rest_bytes = sum(sizes[name] for name in rest.column_names)
        has_place = rest.num_columns > 0 and (is_whole or rest_bytes >= wire.SMALL_BYTES)
        size_bytes = layout.stream_bytes(rest) if has_place else 0
        offsets = {offset for pieces in columns.values() for offset in layout.offsets_of(pieces)}
        new = self._grant(wanted, offsets, size_bytes)
        if new is None:
            return None
        message = layout.SharedTable(grant=wanted.grant, columns=columns)
        for slot in new:
            layout.copy_stream(rest, self._writable(slot))
            message.rest = (slot.offset, slot.size_bytes)
            rest = rest.slice(0, 0)
        return message, rest

    def _grant(self, wanted: m.SharedRef, offsets: set[int], size_bytes: int) -> list[Slot] | None:
        """Hold slots for a client; return the new one of `size_bytes` if that is not 0, None if it cannot be."""
        with self._lock:
            self._catch_up()
            guest = self._guests.get(wanted.connection)
            if guest is None or guest.has_used(wanted.grant):
                return None
            # The table still points at these slots, so they cannot have been freed.
            found = {slot.slot_id for offset in offsets if (slot := self._arena.find(offset)) is not None}
            slot = self._allocate(size_bytes) if size_bytes else None
            if size_bytes and slot is None:
                self._warn_full(size_bytes)
                return None
            for slot_id in found:
                self._arena.hold(slot_id)
            new = [slot] if slot is not None else []
            guest.grants[wanted.grant] = [*found, *(each.slot_id for each in new)]
            return new

    def _writable(self, slot: Slot) -> pa.Buffer:
        return pa.py_buffer(memoryview(self._memory)[slot.offset : slot.offset + slot.size_bytes])

    def _warn_full(self, size_bytes: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            LOG.warning(
                "shared memory is full, rows go over the socket; a larger --shared-memory-bytes helps",
                arena_bytes=self._arena.capacity_bytes,
                used_bytes=self._arena.used_bytes,
                wanted_bytes=size_bytes,
            )

    # ---- rows in ----------------------------------------------------------------------------------------------

    def adopt(self, connection: str, slot_ids: Sequence[int]) -> list[pa.RecordBatch]:
        """Return the batches that a client wrote into its slots, one a slot; they are held while they are looked at.

        Raises:
            UnavailableError: the client's socket has closed.
            InvalidRequestError: a slot is not one that the client was given, or there is no Arrow stream in it.
        """
        with self._lock:
            self._catch_up()
            guest = self._guests.get(connection)
            if guest is None:
                raise UnavailableError(
                    "put_shared: connection must be that of an open socket, got one that is not; connect again"
                )
            owned = {slot_id for grant in guest.grants.values() for slot_id in grant}
            slots = [self._arena.get(slot_id) if slot_id in owned else None for slot_id in slot_ids]
            buffers = []
            for slot_id, slot in zip(slot_ids, slots, strict=True):
                if slot is None:
                    raise InvalidRequestError(
                        f"put_shared: slots must be held by the client, got {slot_id}; allocate it first"
                    )
                self._arena.hold(slot_id)
                buffers.append(self._held(slot))
        return [_read_batch(buffer) for buffer in buffers]

    def _held(self, slot: Slot) -> pa.Buffer:
        hold = _Hold(self._buffer)
        # Runs wherever the last array dies, maybe inside our lock: it only notes down.
        weakref.finalize(hold, self._let_go.append, slot.slot_id).atexit = False
        return pa.foreign_buffer(self._buffer.address + slot.offset, slot.size_bytes, hold)

    def _catch_up(self) -> None:
        while self._let_go:
            self._arena.release(self._let_go.popleft())

    # ---- socket -----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            try:
                user = wire.peer_user(connection)
            except OSError:  # Gone again.
                connection.close()
                continue
            if not wire.is_same_user(user):
                LOG.warning("a process of another user was refused shared memory", user=user)
                connection.close()
                continue
            threading.Thread(
                target=self._serve, args=(connection,), name="shared-memory-client", daemon=True
            ).start()

    def _is_invited(self, connection: socket.socket) -> bool:
        """Return whether a new connection shows a ticket; it is used up then."""
        try:
            connection.settimeout(JOIN_S)
            message = wire.decode(connection.recv(wire.MAX_MESSAGE_BYTES), wire.Join)
            connection.settimeout(None)
        except OSError:
            return False
        with self._lock:
            if message is None or message.ticket not in self._tickets:
                LOG.warning("a process without a ticket was refused shared memory")
                return False
            self._tickets.remove(message.ticket)
            return True

    def _serve(self, connection: socket.socket) -> None:
        if not self._is_invited(connection):
            connection.close()
            return
        guest = _Guest(connection)
        with self._lock:
            self._guests[guest.name] = guest
        try:
            welcome = wire.Welcome(connection=guest.name, arena_bytes=self._arena.capacity_bytes)
            socket.send_fds(connection, [msgspec.json.encode(welcome)], [self._descriptor])
            while packet := connection.recv(wire.MAX_MESSAGE_BYTES):
                message = wire.decode(packet, wire.Allocate | wire.Free)
                if message is None:
                    LOG.warning("a client of shared memory sent what is no message and is let go")
                    break
                answer = self._handle(guest, message)
                if answer is not None:
                    connection.send(msgspec.json.encode(answer))
        except OSError:
            pass  # The client is gone, which is how most of them go.
        finally:
            with self._lock:
                del self._guests[guest.name]
                for slot_ids in guest.grants.values():
                    self._release(slot_ids)
            connection.close()

    def _handle(self, guest: _Guest, message: wire.Allocate | wire.Free) -> Any:
        with self._lock:
            self._catch_up()
            if isinstance(message, wire.Free):
                self._free(guest, message)
                return None
            slots: list[Slot] = []
            for size_bytes in message.sizes_bytes[: wire.MAX_SLOTS]:
                slot = self._allocate(size_bytes) if size_bytes > 0 else None
                if slot is None:
                    self._release([each.slot_id for each in slots])
                    return wire.Allocated(slots=[])
                slots.append(slot)
            if message.grant in guest.grants:
                self._release([each.slot_id for each in slots])
                return wire.Allocated(slots=[])
            guest.grants[message.grant] = [slot.slot_id for slot in slots]
            return wire.Allocated(slots=[(slot.slot_id, slot.offset) for slot in slots])

    def _free(self, guest: _Guest, message: wire.Free) -> None:
        if message.until is not None:
            block = range(message.grant, message.until)
            guest.ended_blocks.append(block)
            for grant in [each for each in guest.grants if each in block]:
                self._release(guest.grants.pop(grant))
            return
        slot_ids = guest.grants.pop(message.grant, None)
        if slot_ids is None:
            guest.ended.add(message.grant)
        else:
            self._release(slot_ids)

    def _release(self, slot_ids: Sequence[int]) -> None:
        for slot_id in slot_ids:
            self._arena.release(slot_id)

    def _allocate(self, size_bytes: int) -> Slot | None:
        slot = None if self._is_closed else self._arena.allocate(size_bytes)
        if slot is not None and 2 * (end := slot.offset + size_bytes) > self._made_bytes:
            start = max(self._made_bytes, end)
            self._made_bytes = max(4 * end, MIN_PREFAULT_BYTES)
            threading.Thread(
                target=self._make_pages, args=(start, self._made_bytes), name="prefault", daemon=True
            ).start()
        return slot

    def _make_pages(self, start: int, end: int) -> None:
        """Make pages of the arena: a fault on a fresh page costs three times what copying it does."""
        end = min(end, self._arena.capacity_bytes)
        for offset in range(start, end, PREFAULT_STEP_BYTES):
            size = min(PREFAULT_STEP_BYTES, end - offset)
            try:
                os.posix_fallocate(self._descriptor, offset, size)
            except OSError as error:
                LOG.warning("shared memory could not be prepared whole", error=str(error))
                return


def _make_arena(size_bytes: int) -> int:
    descriptor = os.memfd_create("flight-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    # Nobody may make it shorter: who reads a page that is gone is killed.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def _default_root() -> Path:
    return Path(tempfile.gettempdir()) / f"flight-shared-{os.geteuid()}"


def _make_directory(root: Path) -> tuple[Path, Any]:
    """Make a directory that only this user may enter, and remove those of servers that are gone."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = root.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o170077 != 0o040000:
        raise PermissionError(f"serve: {root} must be a directory of this user alone (0700); remove it")
    for lock in root.glob("server-*/lock"):
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(lock.parent, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix="server-", dir=root))
    owner_lock = (directory / "lock").open("w")
    fcntl.flock(owner_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return directory, owner_lock


def _read_batch(buffer: pa.Buffer) -> pa.RecordBatch:
    try:
        return pa.ipc.open_stream(buffer).read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise InvalidRequestError(
            f"put_shared: a slot must hold an Arrow stream of one batch, got: {error}"
        ) from error


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
