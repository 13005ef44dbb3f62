"""Who is let in, and what is no message."""

from __future__ import annotations

import os
import socket

from flight.shared import wire


def test_peer_user_is_known_to_the_kernel():
    """The other end of a socket pair is this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert wire.peer_user(ours) == os.geteuid()


def test_other_users_are_refused():
    """Root is another user too."""
    assert wire.is_same_user(os.geteuid())
    assert not wire.is_same_user(os.geteuid() + 1)


def test_decode_takes_what_is_no_message_for_none():
    """So is the end of a connection."""
    kind = wire.Allocate | wire.Free
    assert wire.decode(b'{"type": "free", "grant": 3}', kind) == wire.Free(grant=3)
    assert [wire.decode(packet, kind) for packet in (b"", b"{}", b"\xff", b'{"type": "free"}')] == [None] * 4


def test_boot_id_names_this_boot():
    """Always the same one."""
    assert wire.boot_id() == wire.boot_id() != ""
