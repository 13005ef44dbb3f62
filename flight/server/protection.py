"""What stands before a server: its keys in use. It owns the guard, the audit log and the certificates; no sockets."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from flight.client.credentials import Credentials
from flight.errors import InvalidRequestError
from flight.security.audit import AuditLog
from flight.security.guard import Guard

if TYPE_CHECKING:
    from flight.security.certificates import Certificates

ACCESS_FILE, AUDIT_FILE, SERVER = "access.json", "audit.jsonl", "server"
STORAGE = "storage"
"""The principal as which a server and its storage servers call each other."""

LOG = structlog.get_logger("flight.server.protection")


class Protection:
    """A directory of keys, as `flight.security.keys` makes it, in use by one server.

    Raises:
        InvalidRequestError: a file is missing or wrong.
    """

    def __init__(self, directory: Path, *, mutual_tls: bool = True, audit_file: str = AUDIT_FILE) -> None:
        self._directory = directory
        self._home = directory / SERVER
        self._mutual_tls = mutual_tls
        self._stamp = _stamp(self._home)
        self._certificates = _load(self._home)
        self._audit = _open_audit(directory / audit_file)
        self.guard = Guard(directory / ACCESS_FILE, audit=self._audit, checks_certificates=mutual_tls)

    def close(self) -> None:
        """Close the audit log. Idempotent."""
        self._audit.close()

    def options(self) -> dict[str, Any]:
        """Return what a Flight server is constructed with."""
        found = self._certificates
        options: dict[str, Any] = {
            "tls_certificates": [(found.certificate, found.key)],
            "middleware": self.guard.middleware(),
        }
        if self._mutual_tls:
            options |= {"verify_client": True, "root_certificates": found.roots}
        return options

    def storage_credentials(self) -> Credentials:
        """Return what a server and its storage servers show to each other.

        Raises:
            InvalidRequestError: there are no such credentials.
        """
        home = self._directory / STORAGE
        if not home.is_dir():
            raise InvalidRequestError(
                f"storage: keys must be there of a principal {STORAGE!r} with the role store on *, got none in "
                f"{self._directory}; make keys with `python -m flight keys`"
            )
        return Credentials.load(home)

    def look(self, *, anew: bool = False) -> bool:
        """Return whether there are other certificates than before, or `anew` asks for it; bad ones are left alone."""
        stamp = _stamp(self._home)
        if stamp == self._stamp and not anew:
            return False
        self._stamp = stamp
        try:
            self._certificates = _load(self._home)
        except InvalidRequestError as error:
            LOG.warning("the new certificates are not used, the old ones stay", reason=str(error))
            return False
        return True


def check_address(host: str, *, is_protected: bool, allow_insecure: bool) -> None:
    """Check that a server may listen on an address.

    Raises:
        InvalidRequestError: others than processes of this host may reach it, and it has no keys.
    """
    if is_protected or allow_insecure or _is_loopback(host):
        return
    raise InvalidRequestError(
        f"serve: host must be a loopback address without --keys, got {host!r}; make keys with `python -m flight keys`, "
        "or say --allow-insecure in a network that is closed otherwise"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _open_audit(path: Path) -> AuditLog:
    try:
        return AuditLog(path)
    except OSError as error:
        raise InvalidRequestError(
            f"{path}: must be a file that the server may write, got: {error.strerror}"
        ) from error


# The library that reads certificates is loaded by servers that have some, not by every command.


def _load(home: Path) -> Certificates:
    from flight.security.certificates import Certificates

    return Certificates.load(home)


def _stamp(home: Path) -> object:
    from flight.security.certificates import stamp_of

    return stamp_of(home)
