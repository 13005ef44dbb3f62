"""HTTP to one SGLang server: typed bodies out, typed answers in, a deadline on every wait. It retries nothing.

Safe for several threads: each call has a connection of its own.
"""

from __future__ import annotations

import http.client
import socket
import threading
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from relax.errors import ConfigError, ServiceError
from relax.rollout.sglang_messages import ServerInfo, decode, error_of

Answer = TypeVar("Answer")


class ServerGoneError(ServiceError):
    """The server does not listen, closed the connection, or did not answer in time."""


class RequestRefusedError(ServiceError):
    """The server said that the request cannot be (status 400)."""


class SGLangClient:
    """One server.

    Args:
        url: `http://host:port`, with a path before the endpoints if it is behind a proxy.
        deadline_s: Longest silence of the server within a call, unless the call has another.
    """

    def __init__(self, url: str, *, deadline_s: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"rollout.engine_urls: must be http://host:port, got {url!r}")
        self.url = url.rstrip("/")
        self._parts = parts
        self._deadline_s = deadline_s
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    def post(self, path: str, body: object, kind: type[Answer], *, deadline_s: float | None = None) -> Answer:
        """Send `body` as JSON and return the answer.

        Raises:
            ServerGoneError: There is no server, it went away, or it was silent for longer than the deadline.
            RequestRefusedError: It refused the request; the message is its own.
            ServiceError: It failed, or answered something else.
        """
        answer = self._call("POST", path, msgspec.json.encode(body), deadline_s)
        return decode(answer, kind, f"{self.url}{path}")

    def tell(self, path: str, body: object, *, deadline_s: float | None = None) -> None:
        """Send `body` where the answer says nothing; raises as `post` does."""
        self._call("POST", path, msgspec.json.encode(body), deadline_s)

    def info(self, *, deadline_s: float = 10.0) -> ServerInfo:
        """Return what the server is; raises as `post` does."""
        answer = self._call("GET", "/server_info", None, deadline_s)
        return decode(answer, ServerInfo, f"{self.url}/server_info")

    def hang_up(self) -> None:
        """Close every connection in use: the calls end with ServerGoneError, and the server drops their requests."""
        with self._lock:
            waiting = list(self._open)
        for connection in waiting:
            if connection.sock is not None:
                try:
                    connection.sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # it was closed this instant

    def _call(self, method: str, path: str, body: bytes | None, deadline_s: float | None) -> bytes:
        where = f"{self.url}{path}"
        connection = self._connection(deadline_s or self._deadline_s)
        with self._lock:
            self._open.add(connection)
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, self._parts.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            status, answer = response.status, response.read()
        except TimeoutError as error:
            limit_s = deadline_s or self._deadline_s
            raise ServerGoneError(f"{where}: must answer within {limit_s:g} s, got nothing") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerGoneError(f"{where}: must answer, got {type(error).__name__}: {error}") from error
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        if status == http.HTTPStatus.BAD_REQUEST:
            raise RequestRefusedError(f"{where}: {error_of(answer)}")
        if status != http.HTTPStatus.OK:
            raise ServiceError(f"{where}: must answer with status 200, got {status}: {error_of(answer)}")
        return answer

    def _connection(self, deadline_s: float) -> http.client.HTTPConnection:
        kind: Any = http.client.HTTPConnection
        if self._parts.scheme == "https":
            kind = http.client.HTTPSConnection
        return kind(self._parts.hostname, self._parts.port, timeout=deadline_s)
