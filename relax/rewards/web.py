"""One POST of JSON with a deadline for the whole of it and a bound on the answer. It retries nothing, follows nothing.

Safe for several threads: each call has a connection of its own.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from relax.errors import ConfigError
from relax.rewards.base import RewardFailedError

RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)
MAX_SHOWN_BYTES = 200


def check_url(url: str) -> None:
    """Check that `url` can be posted to.

    Raises:
        ConfigError: it is no http or https URL with a host.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"url: must be http://host:port/path or https, got {url!r}")


def post_json(url: str, body: object, *, deadline_s: float, max_answer_bytes: int, token: str = "") -> bytes:
    """Send `body` as JSON and return the answer's bytes.

    Args:
        url: Where to.
        body: What msgspec can encode.
        deadline_s: Longest time of everything together.
        max_answer_bytes: A longer answer is refused.
        token: Sent as a bearer token.

    Raises:
        RewardFailedError: no answer in time, a status other than 200, or too long an answer.
    """
    parts = urlsplit(url)
    where = f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"
    call = _Call(parts, deadline_s)
    headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        status, answer = call.answer(msgspec.json.encode(body), headers, max_answer_bytes + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if call.is_over:
            raise RewardFailedError(f"{where}: must answer within {deadline_s:g} s, got no end") from error
        raise RewardFailedError(f"{where}: must answer, got {type(error).__name__}: {error}") from error
    if call.is_over:  # hung up by us, which can look like the end of an answer
        raise RewardFailedError(f"{where}: must answer within {deadline_s:g} s, got no end")
    if status != http.HTTPStatus.OK:
        shown = answer[:MAX_SHOWN_BYTES].decode(errors="replace")
        raise RewardFailedError(
            f"{where}: must answer with status 200, got {status}: {shown}", retry=status in RETRIED_STATUS
        )
    if len(answer) > max_answer_bytes:
        raise RewardFailedError(f"{where}: answer must have at most {max_answer_bytes} bytes, got more")
    return answer


class _Call:
    """One connection, closed from a second thread at the deadline: a timeout of the socket alone begins anew with
    every byte."""

    def __init__(self, parts: SplitResult, deadline_s: float) -> None:
        kind: Any = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=deadline_s)
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._end_s = time.monotonic() + deadline_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end_s

    def answer(self, body: bytes, headers: dict[str, str], max_bytes: int) -> tuple[int, bytes]:
        """Return status and the first `max_bytes` of the answer."""
        try:
            self._connection.connect()
            # The connection forgets its socket once it has read the answer's head.
            remaining_s = max(self._end_s - time.monotonic(), 0.0)
            watch = threading.Timer(remaining_s, _hang_up, [self._connection.sock])
            watch.daemon = True
            watch.start()
            try:
                self._connection.request("POST", self._target, body, headers)
                response = self._connection.getresponse()
                return response.status, response.read(max_bytes)
            finally:
                watch.cancel()
        finally:
            self._connection.close()


def _hang_up(connected: socket.socket) -> None:
    try:
        # The plain shutdown also for TLS: ssl's own takes the object from under the reader.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
    except OSError:
        return  # it was closed this instant
