"""A storage server as a process of its own: serve, join the coordinator, and leave in good order.

On SIGTERM or SIGINT it drains: rows go elsewhere from then on, and it ends when the last of its rows is finished, at a
second signal, or after `drain_s`; what is left then is lost, and counted so. When the process that it serves ends, it
ends at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import structlog

from flight.data.spill import SpillDirectory
from flight.errors import UnavailableError
from flight.output import keep_printing
from flight.server.faces import Faces
from flight.server.idle import IDLE_S, PutWatch
from flight.server.process import (
    GRACE_S,
    LOG_STEPS,
    Renewal,
    face_the_public,
    open_shared_memory,
    stop_with,
    write_whole,
)
from flight.server.protection import Protection, check_address
from flight.storage.member import Seat
from flight.storage.server import StorageServer
from flight.storage.values import ValueStore

DRAIN_S = 600.0
"""Seconds that a storage server waits for its rows to be finished before it leaves."""

LOOK_S = 0.2
"""How often it looks whether it is to end."""

LOG = structlog.get_logger("flight.storage")


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """How a storage server runs.

    location: the URI at which others reach it; empty for the address that it listens on.
    capacity_bytes: bound of all values, in memory and on disk; None for none.
    memory_bytes: what stays in memory if there is a `spill_dir`.
    shared_memory_bytes: memory for clients of this host and user, 0 for none.
    keys: as of `flight.server.process.serve`; the coordinator's access file and authority, and the principal `storage`.
    mutual_tls: ask callers for their certificates, too.
    allow_insecure: listen beyond loopback without keys, where whoever reaches the port may read and write.
    """

    coordinator: str
    host: str = "127.0.0.1"
    port: int = 0
    location: str = ""
    capacity_bytes: int | None = None
    spill_dir: Path | None = None
    memory_bytes: int = 1 << 30
    shared_memory_bytes: int = 0
    put_idle_s: float = IDLE_S
    drain_s: float = DRAIN_S
    uri_file: Path | None = None
    parent_pid: int | None = None
    keys: Path | None = None
    mutual_tls: bool = True
    allow_insecure: bool = False


def serve_storage(options: StorageOptions, *, announce: Callable[[str], None]) -> int:
    """Serve until told to stop; returns the exit code. `announce` is called with the address once it has joined.

    Raises:
        UnavailableError: the address cannot be listened on, or there is no coordinator.
        InvalidRequestError: the keys or the address cannot be, or the coordinator does not reach this server at its
            location.
    """
    keep_printing()
    structlog.configure(processors=LOG_STEPS, logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    check_address(options.host, is_protected=options.keys is not None, allow_insecure=options.allow_insecure)
    face_the_public()
    protection = _protection(options)
    stop, hurry = threading.Event(), threading.Event()

    def on_signal(*_: object) -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    if options.parent_pid is not None:
        stop_with(options.parent_pid, hurry)
    spill = SpillDirectory(options.spill_dir) if options.spill_dir is not None else None
    values = ValueStore(capacity_bytes=options.capacity_bytes, spill=spill, memory_bytes=options.memory_bytes)
    credentials = None if protection is None else protection.storage_credentials()
    seat = Seat(options.coordinator, values, identity=f"storage-{os.getpid()}", credentials=credentials)
    scheme = "grpc" if protection is None else "grpc+tls"
    puts = PutWatch(idle_s=options.put_idle_s)
    shared = open_shared_memory(options.shared_memory_bytes)

    def listen(port: int) -> StorageServer:
        location = f"{scheme}://{options.host}:{port}"
        return StorageServer(location, seat, puts=puts, shared=shared, protection=protection)

    try:
        faces = Faces(listen(options.port), listen)
    except (pa.ArrowException, OSError) as error:
        raise UnavailableError(
            f"serve: {options.host}:{options.port} must be free to listen on, got: {error}"
        ) from error
    uri = f"{scheme}://{options.host}:{faces.port}"
    seat.join(options.location or uri)
    seat.start()
    if options.uri_file is not None:
        write_whole(options.uri_file, uri + "\n")
    announce(uri)
    renewal = Renewal(faces, protection)
    while not stop.is_set() and not hurry.wait(LOOK_S):
        renewal.look()
    num_left = seat.drain(0.0 if hurry.is_set() else options.drain_s, hurry)
    if num_left:
        LOG.warning("left before its rows were finished", num_lost_rows=num_left)
    seat.leave()
    faces.stop(GRACE_S)
    if protection is not None:
        protection.close()
    if options.uri_file is not None:
        options.uri_file.unlink(missing_ok=True)
    if spill is not None:
        spill.close()
    sys.stdout.flush()
    return 0


def _protection(options: StorageOptions) -> Protection | None:
    """Return the keys in use; the audit log is this server's own, also where several share a directory."""
    if options.keys is None:
        return None
    audit_file = f"audit-storage-{options.port or os.getpid()}.jsonl"
    return Protection(options.keys, mutual_tls=options.mutual_tls, audit_file=audit_file)
