"""What the Unix socket of shared memory says, whom it lets in, and which host this is. No state.

The client sends `Join` with the ticket that a Flight call gave it, and the server answers `Welcome` with the arena's
descriptor. Then the client sends `Allocate`, answered by `Allocated`, and `Free`, which is not answered. One message a
packet, JSON.
"""

from __future__ import annotations

import os
import socket
import struct
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

MAX_MESSAGE_BYTES = 64 << 10
MAX_SLOTS = 512
"""Slots that one message may ask for."""

SMALL_BYTES = 64 << 10
"""Below this, a table travels on the Flight stream: finding a slot would cost more than copying."""

BLOCK_GRANTS = 1 << 40
"""Grants of one block, which a client hands to the server to number what it pushes."""

_CREDENTIALS = struct.Struct("3i")


class Join(msgspec.Struct, kw_only=True):
    """First packet of the client. A ticket lets one client in, once."""

    ticket: str


class Welcome(msgspec.Struct, kw_only=True):
    """The server's answer to a good ticket; the arena's descriptor comes with it."""

    connection: str
    arena_bytes: int


class Allocate(msgspec.Struct, kw_only=True, tag="allocate", tag_field="type"):
    """Slots to write into, all or none, held by `grant`, a number that the client has not used before."""

    grant: int
    sizes_bytes: list[int]


class Free(msgspec.Struct, kw_only=True, omit_defaults=True, tag="free", tag_field="type"):
    """A grant is over, with `until` all from it up to that one, excluded; what has not come to be must not do so."""

    grant: int
    until: int | None = None


class Allocated(msgspec.Struct, kw_only=True):
    """(slot, offset) of each size; none if there is no room."""

    slots: list[tuple[int, int]]


@cache
def boot_id() -> str:
    """Return what tells this boot of this host from all others, an empty string where that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket, as the kernel knows it."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(packed)
    return user


def is_same_user(user: int) -> bool:
    """Return whether a user id is the one that this process runs as."""
    return user == os.geteuid()


def decode(packet: bytes, kind: Any) -> Any:
    """Read a packet; None for the end of the connection and for what is no such message."""
    try:
        return msgspec.json.decode(packet, type=kind) if packet else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
