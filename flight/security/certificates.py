"""A server's certificate, its key and the authority that it trusts, read from files and checked to belong together."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from flight.errors import InvalidRequestError

CERTIFICATE, KEY, ROOTS = FILES = ("certificate.pem", "key.pem", "roots.pem")


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """Bytes of PEM files; the key is not printed with the object."""

    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    roots: bytes = field(repr=False)

    @classmethod
    def load(cls, directory: Path) -> Certificates:
        """Read and check a server's directory. A server must not begin to listen with files that cannot work.

        Raises:
            InvalidRequestError: a file is missing, is not PEM, may be read by others, or has expired, or the key is
                another certificate's.
        """
        found = cls(
            certificate=_read(directory / CERTIFICATE),
            key=_read_secret(directory / KEY),
            roots=_read(directory / ROOTS),
        )
        try:
            leaf = x509.load_pem_x509_certificates(found.certificate)[0]
            x509.load_pem_x509_certificates(found.roots)
            own = serialization.load_pem_private_key(found.key, password=None).public_key()
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(
                f"{directory}: must hold {', '.join(FILES)} in PEM, got: {error}"
            ) from error
        if _spelt(own) != _spelt(leaf.public_key()):
            raise InvalidRequestError(f"{directory / KEY}: must be the key of {CERTIFICATE}, got another")
        if leaf.not_valid_after_utc <= datetime.now(UTC):
            raise InvalidRequestError(
                f"{directory / CERTIFICATE}: must be valid still, got one that ended "
                f"{leaf.not_valid_after_utc.isoformat()}; make new keys"
            )
        return found


def stamp_of(directory: Path) -> tuple[tuple[int, int], ...]:
    """Return what changes when one of the files does."""
    return tuple(_stamp(directory / name) for name in FILES)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_ino)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(
            f"{path}: must be a file that the server may read, got: {error.strerror}; "
            "make keys with `python -m flight keys`"
        ) from error


def _read_secret(path: Path) -> bytes:
    data = _read(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise InvalidRequestError(f"{path}: must be for its owner alone (0600), got {mode:04o}; chmod 600 it")
    return data


def _spelt(key: object) -> bytes:
    return key.public_bytes(  # type: ignore[attr-defined]  # any public key
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
