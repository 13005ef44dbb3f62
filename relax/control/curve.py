"""CURVE keys of the control plane: made, kept in files, and put on sockets. It knows no messages.

    <directory>/members.json         public keys by name of those whom the hub lets in: a role, or `role-index`
    <directory>/server/curve.json    the hub's pair
    <directory>/<name>/curve.json    a member's pair and the hub's public key

A frame between holders of these keys is encrypted, authenticated and cannot be replayed (CurveZMQ, RFC 26); everybody
else's connection ends in the handshake, in silence.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from relax.control.errors import ControlRefusedError, MalformedFrameError
from relax.control.messages import Identity

KEY_FILE = "curve.json"
MEMBERS_FILE = "members.json"
HUB = "server"


class CurveKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One party's pair, and for a member the hub's public key; Z85 text."""

    public: str
    secret: str
    hub: str = ""

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r})"

    @classmethod
    def load(cls, directory: Path) -> CurveKeys:
        """Read a party's directory.

        Raises:
            ControlRefusedError: there are no such keys.
        """
        return _load(directory / KEY_FILE, cls)

    def protect_member(self, socket: zmq.Socket[bytes]) -> None:
        """Have a socket speak to a hub of these keys only; call before it connects."""
        socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()
        socket.curve_serverkey = self.hub.encode()

    def protect_hub(self, socket: zmq.Socket[bytes]) -> None:
        """Have a socket let in only whom its context's `Doorkeeper` knows; call before it binds."""
        socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()
        socket.curve_server = True


class Doorkeeper:
    """Tells a context's sockets whose handshakes are good (ZAP, RFC 27). Runs a thread until `close`.

    Raises:
        ControlRefusedError: there is no list of members.
    """

    def __init__(self, context: zmq.Context[Any], directory: Path) -> None:
        members = _load(directory / MEMBERS_FILE, dict[str, str])
        self._names = {key: name for name, key in members.items()}
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the owner of a public key may come in; called by the authenticator."""
        return key.decode("ascii", "replace") in self._names

    def check(self, frame: zmq.Frame, sender: Identity) -> None:
        """Check that a frame came with the keys of whom it names: those of its role, or of that member of it.

        Raises:
            MalformedFrameError: it came with another's.
        """
        name = self._names.get(str(frame.get("User-Id")))  # the authenticator says the public key there
        if name not in (sender.role, f"{sender.role}-{sender.index}"):
            raise MalformedFrameError(
                f"control frame: sender must be the owner of the keys, {name!r}, got {sender.name!r}"
            )

    def close(self) -> None:
        """Stop the thread."""
        self._authenticator.stop()


def make_curve_keys(directory: Path, names: Sequence[str]) -> None:
    """Make the hub's pair and one for each name; the directory of each is there already."""
    hub = _pair()
    _write_secret(directory / HUB / KEY_FILE, hub)
    members = {}
    for name in names:
        keys = _pair(hub.public)
        members[name] = keys.public
        _write_secret(directory / name / KEY_FILE, keys)
    _write_secret(directory / MEMBERS_FILE, members)


def _pair(hub: str = "") -> CurveKeys:
    public, secret = zmq.curve_keypair()
    return CurveKeys(public=public.decode(), secret=secret.decode(), hub=hub)


def _load(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ControlRefusedError(f"{path}: must hold CURVE keys, got: {error}") from error


def _write_secret(path: Path, value: Any) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as sink:
        sink.write(msgspec.json.encode(value))
