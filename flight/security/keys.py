"""Keys on disk: certificates, tokens and the access file of one run, made in one go. It asks nobody and serves nothing.

    <directory>/                   0700, every file in it 0600
      access.json                  who may call, by hash of the token
      server/   certificate.pem key.pem roots.pem
      <principal>/  token certificate.pem key.pem roots.pem     one directory each: hand it to whom it is for

The authority's own key is used once and thrown away: to add principals later, make the keys anew or use your own
authority; the files' names are all that matters.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from flight.errors import InvalidRequestError
from flight.security.access import AccessFile, Principal, Role, hash_token

VALID_DAYS = 30
CLOCK_SKEW = timedelta(minutes=5)
"""Certificates are good from a little earlier than now: the clocks of hosts differ."""


SERVER = "server"
"""Directory of the server's own certificate, which is no principal's."""

_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A principal to be made; its name is that of a directory and of a host in a certificate.

    Raises:
        InvalidRequestError: the name cannot be either.
    """

    name: str
    grants: Mapping[str, Sequence[Role]]
    shares_memory: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name == SERVER:
            raise InvalidRequestError(
                f"keys: name of a principal must be letters, digits, '-' or '_', and not {SERVER!r}, got {self.name!r}"
            )


def make_keys(
    directory: Path, principals: Sequence[Wanted], *, hosts: Sequence[str], valid_days: float = VALID_DAYS
) -> None:
    """Make the authority, the server's certificate for `hosts` (names or addresses), and every principal's directory.

    Raises:
        FileExistsError: the directory is there already.
        InvalidRequestError: two principals share a name, or a host can be in no certificate.
    """
    names = [wanted.name for wanted in principals]
    if len(set(names)) < len(names):
        raise InvalidRequestError(f"keys: names must be one principal's own, got {', '.join(names)}")
    for host in hosts:
        _general_name(host)
    directory.mkdir(mode=0o700, parents=True)
    until = datetime.now(UTC) + timedelta(days=valid_days)
    authority = _Authority(until)
    _write_identity(directory / SERVER, authority, SERVER, hosts)
    entries = []
    for wanted in principals:
        token = secrets.token_urlsafe(32)
        home = directory / wanted.name
        _write_identity(home, authority, wanted.name, [wanted.name])
        _write_secret(home / "token", token.encode() + b"\n")
        entries.append(
            Principal(
                name=wanted.name,
                token_sha256=hash_token(token),
                grants={table: list(roles) for table, roles in wanted.grants.items()},
                expires_at=until,
                shares_memory=wanted.shares_memory,
            )
        )
    _write_secret(
        directory / "access.json", msgspec.json.format(msgspec.json.encode(AccessFile(principals=entries)))
    )


class _Authority:
    """Signs certificates; lives only while keys are made."""

    def __init__(self, until: datetime) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._until = until
        name = _name("relax run authority")
        self._certificate = (
            self._builder(name, name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def roots(self) -> bytes:
        """Return its certificate, which everybody trusts, as PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, name: str, hosts: Sequence[str]) -> tuple[bytes, bytes]:
        """Return a certificate for `hosts` and its key, both PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            self._builder(_name(name), self._certificate.subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False
            )
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return certificate.public_bytes(serialization.Encoding.PEM), private

    def _builder(
        self, subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.now(UTC) - CLOCK_SKEW)
            .not_valid_after(self._until)
        )


def _write_identity(home: Path, authority: _Authority, name: str, hosts: Sequence[str]) -> None:
    home.mkdir(mode=0o700)
    certificate, key = authority.issue(name, hosts)
    _write_secret(home / "certificate.pem", certificate)
    _write_secret(home / "key.pem", key)
    _write_secret(home / "roots.pem", authority.roots)


def _write_secret(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as sink:
        sink.write(data)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not _HOST.fullmatch(host):
        raise InvalidRequestError(f"keys: host must be an address or a plain host name, got {host!r}")
    return x509.DNSName(host)
