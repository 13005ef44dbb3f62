"""Principals and what each may do to which table. Pure: no files, no clocks, no sockets.

A principal is known by the hash of its token; tokens themselves are kept nowhere but with their owners. Its grants say,
for a table or for `*` (all), in which roles it may act there:

    read      look at rows and statistics, ask SQL
    produce   put rows and declare the end
    consume   take, plan, fetch, acknowledge, give back; announce a policy version
    store     keep values for the server, as a storage server does
    keep      keep the state of all tables as a checkpoint, and let it go; on `*` only
    admin     all of these, and make, change, empty and drop tables

Any role on a table lets its principal see that the table is there and what it looks like. What a principal has no role
for does not exist for it: a refusal is the same whether there is such a table or not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Literal

import msgspec

from flight.errors import AccessDeniedError, InvalidRequestError, UnauthenticatedError

Role = Literal["read", "produce", "consume", "store", "keep", "admin"]
Right = Literal["call", "look", "values", "read", "produce", "consume", "store", "keep", "admin"]
"""What a request needs: `call` only to be known, `look` any role on the table, `values` one that leads to rows
(`read`, `consume`, `store`), the others that role.
"""

ROW_ROLES = {"read", "consume", "store"}

ALL_TABLES = "*"
MIN_TOKEN_CHARS = 32
"""A token shorter than this could be guessed."""


class Principal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One who may call.

    name: in the audit log and in errors; with mutual TLS also the name in the certificate.
    token_sha256: of the token's bytes, in hex.
    grants: roles by table name, `*` for all tables.
    expires_at: after it the token is as good as none; never if null.
    max_calls_per_s: calls, and messages on open streams, that the server answers a second, over about a second; no
        bound if null.
    shares_memory: may map the server's memory, in which the rows of all tables lie.
    """

    name: str
    token_sha256: str
    grants: dict[str, list[Role]] = {}
    expires_at: datetime | None = None
    max_calls_per_s: float | None = None
    shares_memory: bool = False

    def roles(self, table: str) -> set[Role]:
        """Return the roles that this principal has on a table."""
        return {*self.grants.get(table, ()), *self.grants.get(ALL_TABLES, ())}

    def may(self, right: Right, table: str) -> bool:
        """Return whether a request that needs `right` on `table` may be made."""
        if right == "call":
            return True
        roles = self.roles(table)
        if right == "look":
            return bool(roles)
        return "admin" in roles or bool(roles & (ROW_ROLES if right == "values" else {right}))

    def visible(self, right: Right, tables: Iterable[str]) -> list[str]:
        """Return those of `tables` on which this principal has the right."""
        return [table for table in tables if self.may(right, table)]

    def check(self, right: Right, tables: Iterable[str]) -> None:
        """Return if a request may be made.

        Raises:
            AccessDeniedError: a table is not covered; it names the right and the table that was asked for.
        """
        for table in tables:
            if not self.may(right, table):
                raise AccessDeniedError(
                    f"{self.name}: must have the right to {right} on table {table!r}, got none; "
                    "whoever runs the server grants it"
                )


class AccessFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What lies on disk: the format's version and everybody who may call."""

    version: Literal[1] = 1
    principals: list[Principal]


class AccessList:
    """Everybody who may call a server.

    Raises:
        InvalidRequestError: two principals share a name or a token, or a name is empty.
    """

    def __init__(self, principals: Iterable[Principal]) -> None:
        self._by_hash: dict[str, Principal] = {}
        names: set[str] = set()
        for each in principals:
            if not each.name or each.name in names or each.token_sha256 in self._by_hash:
                raise InvalidRequestError(
                    f"access list: names and tokens must be one principal's own, got {each.name!r} again"
                )
            names.add(each.name)
            self._by_hash[each.token_sha256] = each

    def __len__(self) -> int:
        return len(self._by_hash)

    def authenticate(self, token: str | None, now: datetime) -> Principal:
        """Return whose token it is.

        The lookup is by hash, so that how long it takes tells nothing about tokens.

        Raises:
            UnauthenticatedError: there is no token, nobody has it, or it has expired. It never repeats the token.
        """
        if not token:
            raise UnauthenticatedError(
                "call: a bearer token must come with it, got none; see docs/security.md"
            )
        return self.confirm(hash_token(token), now)

    def confirm(self, token_sha256: str, now: datetime) -> Principal:
        """Return whose token has this hash.

        Raises:
            UnauthenticatedError: nobody's, or it has expired.
        """
        principal = self._by_hash.get(token_sha256)
        if principal is None:
            raise UnauthenticatedError("call: the bearer token must be known to the server, got another")
        if principal.expires_at is not None and now >= principal.expires_at:
            raise UnauthenticatedError(
                f"call: the bearer token of {principal.name} must not have expired, got one of "
                f"{principal.expires_at.isoformat()}; ask for a new one"
            )
        return principal


def hash_token(token: str) -> str:
    """Return what the server keeps of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def bearer_token(headers: Mapping[str, Iterable[str | bytes]]) -> str | None:
    """Return the token in the headers of a call, None if there is not exactly one."""
    values = [value for name, found in headers.items() if name.lower() == "authorization" for value in found]
    if len(values) != 1:
        return None
    text = values[0].decode("latin-1") if isinstance(values[0], bytes) else values[0]
    scheme, _, token = text.partition(" ")
    return token if scheme.lower() == "bearer" and token else None
