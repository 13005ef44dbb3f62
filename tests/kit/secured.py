"""A queue server with keys, and credentials of all kinds to come with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import msgspec
import pyarrow.flight as paflight

from flight.client import QueueClient
from flight.client.credentials import Credentials
from flight.security.access import AccessFile
from flight.security.keys import Wanted, make_keys
from tests.kit.server import queue_server

DEADLINE_S = 20.0


@dataclass(frozen=True)
class Secured:
    """A server that was started with keys."""

    uri: str
    keys: Path
    process: Popen[str]

    @property
    def port(self) -> int:
        return int(self.uri.rsplit(":", 1)[1])

    def client(self, name: str, home: Path | None = None, **options: Any) -> QueueClient:
        """Return a client with the credentials of a principal, or of another directory."""
        options = {"deadline_s": DEADLINE_S} | options
        return QueueClient(self.uri, identity=name, credentials=home or self.keys / name, **options)

    def plain(self, home: Path, token: str | None) -> paflight.FlightClient:
        """Return pyarrow's own client, with the certificate of a directory and any token."""
        shown = Credentials.load(home)
        return paflight.FlightClient(
            self.uri,
            tls_root_certs=shown.roots,
            cert_chain=shown.certificate,
            private_key=shown.key,
            middleware=[_Says(token)],
        )

    def edit(self, name: str, **changes: Any) -> None:
        """Change a principal's entry in the access file; `None` for `grants` takes the entry out."""
        edit_access(self.keys, name, **changes)

    def mixed(self, name: str, **files: Path | None) -> Path:
        """Return a new directory with the credentials of a principal, some files taken from another or left out."""
        home = self.keys.parent / f"mixed-{name}-{'-'.join(files)}"
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(self.keys / name, home)
        for file, other in files.items():
            target = home / (file if file == "token" else f"{file}.pem")
            target.unlink()
            if other is not None:
                shutil.copy(other / target.name, target)
        return home


def edit_access(keys: Path, name: str, **changes: Any) -> None:
    """Change a principal's entry in an access file; `None` for `grants` takes the entry out."""
    path = keys / "access.json"
    found = msgspec.json.decode(path.read_bytes(), type=AccessFile)
    principals = [
        msgspec.structs.replace(each, **changes) if each.name == name else each
        for each in found.principals
        if each.name != name or changes.get("grants", {}) is not None
    ]
    draft = path.with_name("access.draft")
    draft.touch(0o600)
    draft.write_bytes(msgspec.json.encode(AccessFile(principals=principals)))
    draft.replace(path)


@contextmanager
def secured_server(
    directory: Path,
    grants: Mapping[str, Mapping[str, Sequence[Any]]],
    *options: str,
    **changes: dict[str, Any],
) -> Iterator[Secured]:
    """Run a server on a free port with keys of these principals; `admin` shares memory.

    `changes` are made in the access file before it starts, by principal.
    """
    keys = directory / "keys"
    wanted = [
        Wanted(name=name, grants=tables, shares_memory=name == "admin") for name, tables in grants.items()
    ]
    make_keys(keys, wanted, hosts=["127.0.0.1"])
    for name, values in changes.items():
        edit_access(keys, name, **values)
    with queue_server("--keys", str(keys), *options) as (uri, process):
        yield Secured(uri, keys, process)


class _Says(paflight.ClientMiddlewareFactory):
    def __init__(self, token: str | None) -> None:
        super().__init__()
        self._token = token

    def start_call(self, info: paflight.CallInfo) -> paflight.ClientMiddleware:
        return _Header(self._token)


class _Header(paflight.ClientMiddleware):
    def __init__(self, token: str | None) -> None:
        super().__init__()
        self._token = token

    def sending_headers(self) -> dict[str, str]:
        return {} if self._token is None else {"authorization": f"Bearer {self._token}"}
