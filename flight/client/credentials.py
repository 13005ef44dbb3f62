"""What a client shows to a server and what it trusts: a directory of files, as `flight.security.keys` makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from flight.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Bytes of PEM files and a token; what is missing is not shown. Neither is printed with the object."""

    token: str | None = field(default=None, repr=False)
    roots: bytes | None = field(default=None, repr=False)
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)

    @classmethod
    def load(cls, directory: Path) -> Credentials:
        """Read `token`, `roots.pem`, `certificate.pem` and `key.pem`, those that are there.

        Raises:
            InvalidRequestError: there is neither a token nor a certificate, or the key of a certificate is missing.
        """
        files = {
            name: _read(directory / name) for name in ("token", "roots.pem", "certificate.pem", "key.pem")
        }
        token = files["token"]
        if token is None and files["certificate.pem"] is None:
            raise InvalidRequestError(
                f"credentials: {directory} must hold a token or certificate.pem, got neither"
            )
        if (files["certificate.pem"] is None) != (files["key.pem"] is None):
            raise InvalidRequestError(
                f"credentials: {directory} must hold certificate.pem and key.pem together, got one of them"
            )
        return cls(
            token=None if token is None else token.decode("ascii", "replace").strip(),
            roots=files["roots.pem"],
            certificate=files["certificate.pem"],
            key=files["key.pem"],
        )


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidRequestError(f"credentials: {path} must be readable, got: {error}") from error
