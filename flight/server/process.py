"""A queue server as a process of its own: start, tell the address, serve, and end in time on a signal.

On SIGTERM, SIGINT or the end of the process that it serves, the server refuses new calls, wakes those that wait, gives
the rest `GRACE_S` seconds and exits. It does not call `shutdown()`, which hangs while any call is open (pyarrow 26).

With keys, it looks every second whether its certificates have changed, and on SIGHUP takes them anew.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import structlog

from flight.broker import Broker
from flight.data.spill import SpillDirectory
from flight.errors import InvalidRequestError, UnavailableError
from flight.journal.broker import JournaledBroker
from flight.journal.config import JournalConfig
from flight.memory import keep_freed_memory
from flight.output import keep_printing
from flight.schema import TableSpec
from flight.server import QueueServer
from flight.server.faces import Faces
from flight.server.idle import IDLE_S, PutWatch
from flight.server.protection import Protection, check_address
from flight.shared.host import SharedMemoryHost

GRACE_S = 3.0
MAX_FILES = 1 << 20
"""Descriptors that a server asks for at most; each connection has one."""

LOG_STEPS: list[structlog.typing.Processor] = [
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    # Plain tracebacks: the default ones print every local variable, which here is other people's data.
    structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
]

LOG = structlog.get_logger("flight.server.process")


def serve(
    host: str,
    port: int,
    *,
    tables: Sequence[TableSpec] = (),
    uri_file: Path | None = None,
    parent_pid: int | None = None,
    capacity_bytes: int | None = None,
    spill_dir: Path | None = None,
    put_idle_s: float = IDLE_S,
    announce: Callable[[str], None],
    shared_memory_bytes: int = 0,
    journal: JournalConfig | None = None,
    keys: Path | None = None,
    mutual_tls: bool = True,
    allow_insecure: bool = False,
) -> int:
    """Serve until told to stop; returns the exit code. `announce` is called with the address once it answers.

    `tables` are there before the first call is. `capacity_bytes` bounds all tables together, `spill_dir` is where
    tables with `spill` may write, `put_idle_s` is how long the caller of an open put may be silent,
    `shared_memory_bytes` how much memory clients of this host and user may share (0: none). With a `journal` the tables
    of the server before are there, too. `keys` is a directory as `flight.security.keys` makes it, without which only
    loopback addresses are listened on unless `allow_insecure`.

    Raises:
        InvalidRequestError: there is no process `parent_pid`, or the keys or the address cannot be.
        JournalDamagedError: the journal does not hold what was written; the message says what to do.
        UnavailableError: the address cannot be listened on.
    """
    keep_freed_memory()
    keep_printing()
    structlog.configure(processors=LOG_STEPS, logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if parent_pid is not None:
        stop_with(parent_pid, stop)
    check_address(host, is_protected=keys is not None, allow_insecure=allow_insecure)
    face_the_public()
    protection = None if keys is None else Protection(keys, mutual_tls=mutual_tls)
    scheme = "grpc" if protection is None else "grpc+tls"
    spill = SpillDirectory(spill_dir) if spill_dir is not None else None
    prefix = f"{uuid.uuid4().hex[:8]}-"
    broker = (
        Broker(lease_prefix=prefix, capacity_bytes=capacity_bytes, spill=spill)
        if journal is None
        else JournaledBroker(journal, lease_prefix=prefix, capacity_bytes=capacity_bytes, spill=spill)
    )
    puts, shared = PutWatch(idle_s=put_idle_s), open_shared_memory(shared_memory_bytes)

    def listen(port: int, tables: Sequence[TableSpec] = ()) -> QueueServer:
        address = f"{scheme}://{host}:{port}"
        return QueueServer(address, broker, tables=tables, puts=puts, shared=shared, protection=protection)

    try:
        faces = Faces(listen(port, tables), listen)
    except (pa.ArrowException, OSError) as error:
        raise UnavailableError(f"serve: {host}:{port} must be free to listen on, got: {error}") from error
    uri = f"{scheme}://{host}:{faces.port}"
    if uri_file is not None:
        write_whole(uri_file, uri + "\n")
    announce(uri)
    renewal = Renewal(faces, protection)
    # A bare wait() could not be interrupted by a signal handler's event on every platform; a second is soon enough.
    while not stop.wait(1.0):
        renewal.look()
    if not faces.stop(GRACE_S):
        LOG.warning("calls were still open at the end", grace_s=GRACE_S)
    if protection is not None:
        protection.close()
    if uri_file is not None:
        uri_file.unlink(missing_ok=True)
    if spill is not None:
        spill.close()
    sys.stdout.flush()
    return 0


class Renewal:
    """Takes certificates into use when there are new ones, or SIGHUP asks for it. For the main thread."""

    def __init__(self, faces: Faces, protection: Protection | None) -> None:
        self._faces = faces
        self._protection = protection
        self._is_asked = threading.Event()
        if protection is not None:
            signal.signal(signal.SIGHUP, lambda *_: self._is_asked.set())

    def look(self) -> None:
        """Look whether there are new ones; without keys there never are."""
        if self._protection is None:
            return
        anew = self._is_asked.is_set()
        self._is_asked.clear()
        if self._protection.look(anew=anew) or not self._faces.is_listening:
            self._faces.renew()


def face_the_public() -> None:
    """Let what strangers do to the port neither keep clients out nor fill the log."""
    # gRPC writes a line for each handshake that fails (pyarrow 26).
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if most == resource.RLIM_INFINITY else min(most, MAX_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def open_shared_memory(arena_bytes: int) -> SharedMemoryHost | None:
    """Return memory to share with clients of this host; None if none is wanted, or there is none."""
    if not arena_bytes:
        return None
    try:
        return SharedMemoryHost(arena_bytes)
    except OSError as error:
        LOG.warning("there is no shared memory, rows go over the socket", error=str(error))
        return None


def stop_with(pid: int, stop: threading.Event) -> None:
    """Set `stop` when a process ends. A pidfd also sees a zombie and is never fooled by a reused number."""
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, OverflowError) as error:
        raise InvalidRequestError(
            f"serve: parent-pid must be a running process, got {pid} ({error})"
        ) from error

    def watch() -> None:
        select.select([descriptor], [], [])
        stop.set()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def write_whole(path: Path, text: str) -> None:
    """Write a file so that no reader sees a part of it."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text)
    draft.replace(path)
