"""A TCP relay that keeps what clients send, to send it again. Not a fake: all bytes pass as they are."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Recorder:
    """A relay to `endpoint` (ends with :PORT) on 127.0.0.1; what the client sends is appended to `recorded`."""

    def __init__(self, endpoint: str, recorded: list[bytes]) -> None:
        self._target = int(endpoint.rsplit(":", 1)[1])
        self._recorded = recorded

    def __enter__(self) -> int:
        """Listen; returns the port."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()
        return self._listener.getsockname()[1]

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=_pump, args=(client, server, self._recorded), daemon=True).start()
            threading.Thread(target=_pump, args=(server, client, None), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket, kept: list[bytes] | None) -> None:
    try:
        while data := source.recv(65536):
            if kept is not None:
                kept.append(data)
            target.sendall(data)
    except OSError:
        pass
    finally:
        target.close()


def replay(port: int, recorded: list[bytes], *, silence_s: float) -> bytes:
    """Send again what was recorded, and return the answer, which ends with the connection or a silence."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), 5.0) as connection:
        connection.settimeout(silence_s)
        with suppress(TimeoutError, ConnectionError):
            connection.sendall(b"".join(recorded))
            while data := connection.recv(65536):
                answer += data
    return answer
