"""Errors of the bus: one tree, each with a stable wire code. It knows nothing of sockets.

FlightQueueError
├── SchemaMismatchError   (ValueError)    a batch does not fit its table
├── InvalidRequestError   (ValueError)    a request is malformed or asks for what cannot be
├── TableNotFoundError    (LookupError)   no table of that name
├── TableExistsError      (ValueError)    a table of that name has another specification
├── LeaseLostError        (LookupError)   the lease has expired or is another member's
├── DeadlineExceededError (TimeoutError)  the answer did not come within the deadline
├── CapacityError         (OSError)       one batch is larger than the whole table may be
├── TableSealedError      (RuntimeError)  rows were put after the end was declared
├── MissingReferencesError (LookupError)  rows were put that refer to rows that are not there
├── UnauthenticatedError  (PermissionError) the call has no good token
├── AccessDeniedError     (PermissionError) the caller may not do this there
├── OverloadedError       (RuntimeError)  too many calls wait on the server already
├── JournalFullError      (OSError)       the server's journal has no room on disk
├── JournalDamagedError   (ValueError)    a journal holds something else than what was written
└── UnavailableError      (ConnectionError) no server answers at that address
"""

from __future__ import annotations


class FlightQueueError(Exception):
    """Root of the tree. `code` is what travels on the wire and never changes."""

    code = "internal"


class SchemaMismatchError(FlightQueueError, ValueError):
    code = "schema_mismatch"


class InvalidRequestError(FlightQueueError, ValueError):
    code = "invalid_request"


class TableNotFoundError(FlightQueueError, LookupError):
    code = "table_not_found"


class TableExistsError(FlightQueueError, ValueError):
    code = "table_exists"


class LeaseLostError(FlightQueueError, LookupError):
    code = "lease_lost"


class DeadlineExceededError(FlightQueueError, TimeoutError):
    code = "deadline_exceeded"


class CapacityError(FlightQueueError, OSError):
    code = "capacity"


class TableSealedError(FlightQueueError, RuntimeError):
    code = "table_sealed"


class MissingReferencesError(FlightQueueError, LookupError):
    code = "missing_references"


class UnauthenticatedError(FlightQueueError, PermissionError):
    code = "unauthenticated"


class AccessDeniedError(FlightQueueError, PermissionError):
    code = "access_denied"


class OverloadedError(FlightQueueError, RuntimeError):
    code = "overloaded"


class JournalFullError(FlightQueueError, OSError):
    code = "journal_full"


class JournalDamagedError(FlightQueueError, ValueError):
    code = "journal_damaged"


class UnavailableError(FlightQueueError, ConnectionError):
    code = "unavailable"


BY_CODE: dict[str, type[FlightQueueError]] = {
    cls.code: cls
    for cls in (
        FlightQueueError,
        SchemaMismatchError,
        InvalidRequestError,
        TableNotFoundError,
        TableExistsError,
        LeaseLostError,
        DeadlineExceededError,
        CapacityError,
        TableSealedError,
        MissingReferencesError,
        UnauthenticatedError,
        AccessDeniedError,
        OverloadedError,
        JournalFullError,
        JournalDamagedError,
        UnavailableError,
    )
}
