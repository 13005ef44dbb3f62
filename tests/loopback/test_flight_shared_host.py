"""The server's side of shared memory alone: who gets in, what slots are given, what ends a grant."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from flight import messages as m
from flight.errors import InvalidRequestError, UnavailableError
from flight.shared import wire
from flight.shared.guest import Guest
from flight.shared.host import SharedMemoryHost
from tests.kit.columns import digest
from tests.kit.pixels import DEADLINE_S, pixels, until


@pytest.fixture
def host(tmp_path):
    """A host in this process, its directory only this user's."""
    found = SharedMemoryHost(1 << 20, root=tmp_path / "shared")
    yield found
    found.close()


def test_socket_lies_in_a_directory_of_this_user_alone(host):
    """And is gone with its host."""
    directory = host.path.parent
    assert [path.stat().st_mode & 0o777 for path in (directory, directory.parent)] == [0o700, 0o700]
    host.close()
    assert not directory.exists()


def joining(host):
    """Return the first packet of a client that was invited."""
    return msgspec.json.encode(wire.Join(ticket=host.offer().ticket))


def test_ticket_lets_one_client_in_once(host):
    """A process of this user that did not get one by a Flight call gets no memory."""
    packet = joining(host)
    for first, answer in ((b"", b""), (b'{"ticket": "guess"}', b""), (packet, None), (packet, b"")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(DEADLINE_S)
            connection.connect(str(host.path))
            connection.send(first)
            if answer is None:
                _, descriptors, _, _ = socket.recv_fds(connection, 999, 1)
                os.close(descriptors[0])
            else:
                assert connection.recv(999) == answer


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_are_refused_by_directory_and_by_credentials(host):
    """Who gets as far as the socket still gets no memory."""

    def ask(user: int) -> str:
        code = (
            "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(10)\n"
            f"try: s.connect({str(host.path)!r})\n"
            "except PermissionError: print('directory'); sys.exit()\n"
            f"try: s.send({joining(host)!r}); print('refused' if not s.recv(999) else 'let in')\n"
            "except (ConnectionResetError, BrokenPipeError): print('refused')"
        )
        return subprocess.run(
            ["/usr/bin/env", "python3", "-c", code],
            user=user,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        ).stdout.strip()

    if not ask(0):
        pytest.skip("there is no python3 that other users may run")
    assert (ask(0), ask(65534)) == ("let in", "directory")
    for path in [host.path, *host.path.parents]:
        if path != Path("/") and path.stat().st_uid == 0 and path != Path("/tmp"):
            path.chmod(0o777)
    assert ask(65534) == "refused"


def test_guest_that_talks_nonsense_is_let_go(host):
    """Its slots are freed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(DEADLINE_S)
        connection.connect(str(host.path))
        connection.send(joining(host))
        _, descriptors, _, _ = socket.recv_fds(connection, 999, 1)
        os.close(descriptors[0])
        connection.send(b'{"type": "allocate", "grant": 1, "sizes_bytes": [5000, 1]}')
        assert connection.recv(999) == b'{"slots":[[1,0],[2,8192]]}'
        assert (host.offer().used_bytes, host.offer().num_slots) == (12288, 2)
        connection.send(b"nonsense")
        assert connection.recv(999) == b""
    until(lambda: host.offer().num_slots == 0)


def test_slots_are_given_whole_or_not_at_all(host):
    """A put that does not fit takes no room from others; sizes that are none are refused."""
    guest = Guest(host.offer())
    small = pa.record_batch({"x": pa.array(range(1000), pa.int64())})
    assert guest.write([small] * 500, guest.new_grant()) is None
    assert host.offer().num_slots == 0
    assert len(guest.write([small] * 3, guest.new_grant())) == 3


def test_closed_host_gives_no_slots_and_takes_nothing_from_views(host):
    """What was mapped stays as it is, as nobody gets its bytes any more."""
    guest, other = Guest(host.offer()), Guest(host.offer())
    rows = pixels(2)
    found = guest.open(host.share(rows, m.SharedRef(connection=guest.connection, grant=9)), 9)
    host.close()
    assert other.write([pa.record_batch({"x": [1]})] * 200, other.new_grant()) is None
    until(lambda: not other.is_connected)
    assert host.share(rows, m.SharedRef(connection=other.connection, grant=9)) is None
    assert digest(found["x"]) == digest(rows["x"])


def test_slots_of_others_and_without_a_batch_are_refused(host):
    """Only who was given a slot can put from it, and only a batch."""
    guest, other = Guest(host.offer()), Guest(host.offer())
    [slot] = guest.write([pa.record_batch({"x": [1]})], guest.new_grant())
    with pytest.raises(InvalidRequestError, match=f"slots must be held by the client, got {slot};"):
        host.adopt(other.connection, [slot])
    with pytest.raises(UnavailableError, match="connection must be that of an open socket"):
        host.adopt("nobody", [slot])
    [batch] = host.adopt(guest.connection, [slot])
    assert batch.column("x").to_pylist() == [1]
    [(empty, _)] = other._allocate([4096], other.new_grant())
    with pytest.raises(InvalidRequestError, match="a slot must hold an Arrow stream of one batch"):
        host.adopt(other.connection, [empty])
    del batch
    until(lambda: host.offer().num_slots == 2)


def test_grant_that_is_over_before_it_comes_is_not_made(host):
    """A take whose caller gave up holds nothing; a number is used once."""
    guest = Guest(host.offer())
    rows = pixels(2)
    guest.free(7)
    # The socket keeps the order: once this is answered, the grant is over.
    assert guest.write([pa.record_batch({"x": [1]})], 1) is not None
    guest.free(1)
    ref = m.SharedRef(connection=guest.connection, grant=7)
    assert host.share(rows, ref) is None
    ref = m.SharedRef(connection=guest.connection, grant=8)
    answer = host.share(rows, ref)
    assert answer.num_rows == 0
    assert host.share(rows, ref) is None
    found = guest.open(answer, 8)
    assert digest(found["x"]) == digest(rows["x"])
    del found
    until(lambda: host.offer().num_slots == 0)
