"""Counts what crosses a socket: a relay between clients and a server that adds up the bytes of each direction."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

CHUNK_BYTES = 1 << 20


@dataclass
class Traffic:
    """Bytes so far: `sent` by clients, `received` by them. HTTP/2 and gRPC frames are counted too."""

    uri: str
    sent: int = 0
    received: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, num_bytes: int) -> None:
        """Count."""
        with self._lock:
            setattr(self, name, getattr(self, name) + num_bytes)


@contextmanager
def counted_wire(uri: str) -> Iterator[Traffic]:
    """Yield the traffic of a relay to the server at `uri`, whose own address is `.uri`."""
    host, _, port = uri.removeprefix("grpc://").rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    traffic = Traffic(f"grpc://127.0.0.1:{listener.getsockname()[1]}")
    open_sockets: list[socket.socket] = []

    def pump(source: socket.socket, sink: socket.socket, name: str) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                traffic.add(name, len(data))
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                open_sockets.extend((near, far))
                for pair in ((near, far, "sent"), (far, near, "received")):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield traffic
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        for each in (listener, *open_sockets):
            each.close()
