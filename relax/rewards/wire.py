"""Messages between the rollout service and its reward workers, over a socket pair: a length, then msgpack. No clocks
of its own: the socket's timeout is the caller's.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Any, TypeVar

import msgspec

from relax.rewards.base import RewardInput

MAX_BYTES = 64 << 20
LENGTH = struct.Struct("<I")

Kind = TypeVar("Kind")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """First message to a worker: the rewards it shall have, as name and options, and its share of memory."""

    rewards: list[tuple[str, dict[str, Any]]]
    max_memory_bytes: int


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's first answer: that all is loaded, or why not."""

    error: str = ""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt: the reward's place in `Setup.rewards`, and the sample. The answer is an `Outcome`."""

    reward: int
    sample: RewardInput
    time_limit_s: float


class WorkerSilentError(TimeoutError):
    """The worker did not answer in time."""


class WorkerGoneError(ConnectionError):
    """The worker's end of the connection is closed, or it sent what is no message."""


def send(connection: socket.socket, message: object, *, deadline_s: float | None) -> None:
    """Send one message; None waits for ever.

    Raises:
        WorkerSilentError: it was not taken within `deadline_s`.
        WorkerGoneError: nobody is there.
    """
    data = msgspec.msgpack.encode(message)
    connection.settimeout(deadline_s)
    try:
        connection.sendall(LENGTH.pack(len(data)) + data)
    except TimeoutError as error:
        raise WorkerSilentError(str(error)) from error
    except OSError as error:
        raise WorkerGoneError(str(error)) from error


def receive(connection: socket.socket, kind: type[Kind], *, deadline_s: float | None) -> Kind:
    """Return the next message; raises as `send` does."""
    end_s = None if deadline_s is None else time.monotonic() + deadline_s
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size, end_s))
    if length > MAX_BYTES:
        raise WorkerGoneError(f"a message must be of at most {MAX_BYTES} bytes, got {length}")
    try:
        return msgspec.msgpack.decode(_exactly(connection, length, end_s), type=kind)
    except msgspec.DecodeError as error:
        raise WorkerGoneError(f"a message must be a {kind.__name__}, got {error}") from error


def _exactly(connection: socket.socket, count: int, end_s: float | None) -> bytes:
    received = bytearray()
    while len(received) < count:
        remaining_s = None if end_s is None else end_s - time.monotonic()
        if remaining_s is not None and remaining_s <= 0:
            raise WorkerSilentError("the time is over")
        connection.settimeout(remaining_s)
        try:
            chunk = connection.recv(min(count - len(received), 1 << 16))
        except TimeoutError as error:
            raise WorkerSilentError(str(error)) from error
        except OSError as error:
            raise WorkerGoneError(str(error)) from error
        if not chunk:
            raise WorkerGoneError("the connection was closed")
        received += chunk
    return bytes(received)
