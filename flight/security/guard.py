"""The guard of a server: says who calls, whether they may, and how often; writes the audit log. It answers no call.

    middleware()   every call, before anything of it is looked at: the token in its `authorization` header
    admit()        a call's request, once it is read: its right on its tables, and the certificate under mutual TLS
    Admitted       what was admitted and goes on, such as an open stream: asked again with every message of it

The access file is read again when it changes; a file that cannot be read leaves what was read before in force.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pyarrow.flight as paflight
import structlog

from flight import messages as m
from flight.errors import AccessDeniedError, FlightQueueError, InvalidRequestError, OverloadedError
from flight.security.access import AccessFile, AccessList, Principal, Right, bearer_token
from flight.security.audit import AuditLog
from flight.security.limits import CallBucket
from flight.security.rights import REQUIRED

MIDDLEWARE = "guard"
RELOAD_CHECK_S = 1.0
MAX_PEERS_KNOWN = 4096
"""(principal, peer) pairs remembered, so that the audit log names each once."""

LOG = structlog.get_logger("flight.security.guard")


class Guard:
    """Guards one server. Thread-safe.

    Args:
        access_file: principals, as `flight.security.access.AccessFile` in JSON.
        audit: where events go; nowhere if None.
        checks_certificates: whether callers come with a certificate (mutual TLS), whose name must then be theirs.

    Raises:
        InvalidRequestError: the access file is not one.
    """

    def __init__(
        self, access_file: Path, *, audit: AuditLog | None = None, checks_certificates: bool = False
    ) -> None:
        self._path = access_file
        self._audit = audit
        self._checks_certificates = checks_certificates
        self._lock = threading.Lock()
        self._buckets: dict[str, CallBucket] = {}
        self._seen: set[tuple[str, str]] = set()
        self._stamp = _stamp(access_file)
        self._access = load_access(access_file)
        self._checked_at = time.monotonic()

    def middleware(self) -> dict[str, paflight.ServerMiddlewareFactory]:
        """Return what a Flight server needs in order to ask this guard about every call."""
        return {MIDDLEWARE: _CheckToken(self._authenticate)}

    def admit(
        self,
        context: paflight.ServerCallContext,
        request: str,
        tables: Sequence[str] = (),
        *,
        referred: Sequence[str] = (),
    ) -> Admitted:
        """Return who calls if `request` (a message class or an action) on `tables` is theirs to make.

        `referred` are other tables that it tells something about.

        Raises:
            AccessDeniedError: it is not.
            OverloadedError: they call more often than they may.
        """
        admitted = Admitted(self, context.get_middleware(MIDDLEWARE).principal, context.peer(), request)
        if self._checks_certificates:
            admitted.check_certificate(context.peer_identity())
        admitted.need(REQUIRED.get(request), tables)
        admitted.need("look", referred)
        if REQUIRED[request] in ("admin", "keep") or request == "storage_join":
            admitted.note("allowed", tables=list(tables))
        self._note_first_call(admitted)
        return admitted

    def current(self, principal: Principal) -> Principal:
        """Return what a principal may do now.

        Raises:
            UnauthenticatedError: it is not known any more, or its token has expired.
        """
        self._reload()
        return self._access.confirm(principal.token_sha256, datetime.now(UTC))

    def check_rate(self, principal: Principal) -> None:
        """Count a call, or a message on an open stream.

        Raises:
            OverloadedError: there are more than the principal may make.
        """
        if principal.max_calls_per_s is None:
            return
        now = time.monotonic()
        with self._lock:
            bucket = self._buckets.get(principal.name)
            if bucket is None:
                bucket = self._buckets[principal.name] = CallBucket(principal.max_calls_per_s, now)
            if bucket.take(now):
                return
        raise OverloadedError(
            f"{principal.name}: calls a second must be at most {principal.max_calls_per_s:g}, got one more; call later"
        )

    def note(self, event: str, **facts: object) -> None:
        """Write an event to the audit log, if there is one."""
        if self._audit is not None:
            self._audit.write(event, **facts)  # type: ignore[arg-type]  # keywords are not typed

    def _authenticate(self, token: str | None, method: str) -> Principal:
        self._reload()
        try:
            return self._access.authenticate(token, datetime.now(UTC))
        except FlightQueueError as error:
            self.note("unauthenticated", call=method, reason=str(error))
            raise

    def _reload(self) -> None:
        now = time.monotonic()
        if now - self._checked_at < RELOAD_CHECK_S:
            return
        with self._lock:
            if now - self._checked_at < RELOAD_CHECK_S:
                return
            self._checked_at = now
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            try:
                self._access = load_access(self._path)
            except InvalidRequestError as error:
                LOG.warning("the access file is not read again, the old one stays", reason=str(error))
                self.note("not_reloaded", reason=str(error))
                return
            self._buckets.clear()
        LOG.info("access file read again", num_principals=len(self._access))
        self.note("reloaded")

    def _note_first_call(self, admitted: Admitted) -> None:
        key = (admitted.principal.name, admitted.peer)
        if key in self._seen:
            return
        with self._lock:
            if len(self._seen) >= MAX_PEERS_KNOWN:
                self._seen.clear()
            self._seen.add(key)
        admitted.note("joined")


class Admitted:
    """A request and its principal, as long as the request goes on."""

    def __init__(self, guard: Guard, principal: Principal, peer: str, request: str) -> None:
        self.principal = principal
        self.peer = peer
        self._guard = guard
        self._request = request
        self._needs: list[tuple[Right, Sequence[str]]] = []

    def check_certificate(self, peer_identity: bytes) -> None:
        """Check that the certificate that the call came with is the principal's.

        Raises:
            AccessDeniedError: it is another's.
        """
        name = peer_identity.decode("utf-8", "backslashreplace")
        if name != self.principal.name:
            self._refuse(
                AccessDeniedError(
                    f"{self.principal.name}: must come with a certificate of its own name, got one of {name!r}"
                ),
                (),
            )

    def need(self, right: Right | None, tables: Sequence[str]) -> None:
        """Check that the principal has a right on tables, now and, with `check`, later.

        Raises:
            AccessDeniedError: it has not; nobody has the right None.
            OverloadedError: it calls more often than it may.
        """
        if right is None:
            self._refuse(
                AccessDeniedError(f"{self._request}: nobody must ask for this, got a request"), tables
            )
            return
        if not self._needs:
            self._try(lambda: self._guard.check_rate(self.principal), ())
        self._try(lambda: self.principal.check(right, tables), tables)
        self._needs.append((right, tables))

    def check(self) -> None:
        """Check again, before a further message of the same request is heard; it counts as a call.

        Raises:
            UnauthenticatedError: the principal is not known any more, or its token has expired.
            AccessDeniedError: it has lost the right.
            OverloadedError: it sends more messages than it may.
        """
        self._try(self._check, ())
        self._try(lambda: self._guard.check_rate(self.principal), ())

    def is_revoked(self) -> bool:
        """Return whether the principal may not go on."""
        try:
            self._check()
        except FlightQueueError:
            return True
        return False

    def note(self, event: str, *, tables: Sequence[str] = (), reason: str = "") -> None:
        """Write an event of this request to the audit log."""
        self._guard.note(
            event,
            principal=self.principal.name,
            peer=self.peer,
            call=self._request,
            tables=tables,
            reason=reason,
        )

    def _check(self) -> None:
        principal = self._guard.current(self.principal)
        if principal is not self.principal:
            for right, tables in self._needs:
                principal.check(right, tables)
            self.principal = principal

    def _try(self, check: Callable[[], None], tables: Sequence[str]) -> None:
        try:
            check()
        except FlightQueueError as error:
            self._refuse(error, tables)

    def _refuse(self, error: FlightQueueError, tables: Sequence[str]) -> None:
        self.note("denied", tables=tables, reason=str(error))
        raise error


def load_access(path: Path) -> AccessList:
    """Read an access file.

    Raises:
        InvalidRequestError: it cannot be read, is not of this form, or may be read by others than its owner.
    """
    try:
        mode = path.stat().st_mode & 0o777
        found = msgspec.json.decode(path.read_bytes(), type=AccessFile)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"{path}: must be an access file as in docs/security.md, got: {error}"
        ) from error
    if mode & 0o077:
        raise InvalidRequestError(f"{path}: must be for its owner alone (0600), got {mode:04o}; chmod 600 it")
    return AccessList(found.principals)


class _Caller(paflight.ServerMiddleware):
    def __init__(self, principal: Principal) -> None:
        super().__init__()
        self.principal = principal


class _CheckToken(paflight.ServerMiddlewareFactory):
    """Refuses calls without a good token before anything else of them is looked at."""

    def __init__(self, authenticate: Callable[[str | None, str], Principal]) -> None:
        super().__init__()
        self._authenticate = authenticate

    def start_call(self, info: paflight.CallInfo, headers: dict[str, list[str]]) -> _Caller:
        try:
            return _Caller(self._authenticate(bearer_token(headers), info.method.name.lower()))
        except FlightQueueError as error:
            message, detail = m.error_detail(error)
            raise paflight.FlightUnauthenticatedError(message, extra_info=detail) from None


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_ino)
