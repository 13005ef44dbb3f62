"""What every call to a server of ours goes through: counted, bounded, and its errors made fit for the wire."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.flight as paflight
import structlog

from flight import messages as m
from flight.errors import (
    FlightQueueError,
    InvalidRequestError,
    OverloadedError,
    TableNotFoundError,
    UnavailableError,
)
from flight.server.idle import OpenPut

MAX_CALLS = 2048
"""Calls in progress at once; each holds a thread."""

STOP_LOOK_S = 0.05
"""How often a stop looks whether only silent callers are left."""

LOG = structlog.get_logger("flight.server")

_NOT_FOUND = TableNotFoundError(
    "server: table must be there, got one that is not; list_tables returns those that you may see"
)


class CallGuard:
    """Counts calls in progress. Thread-safe. Unless it `tells_tables`, no error says which tables there are."""

    def __init__(self, *, tells_tables: bool = True) -> None:
        self._tells_tables = tells_tables
        self._num_calls = 0
        self._idle = threading.Condition()

    def wait_idle(self, grace_s: float, num_silent: Callable[[], int]) -> bool:
        """Wait up to `grace_s` for the calls in progress; return whether all have ended.

        `num_silent` counts the calls whose callers say nothing: such a one has nothing in progress, and would not be
        heard before its stream ends.
        """
        ends_at = time.monotonic() + grace_s
        with self._idle:
            while self._num_calls > num_silent():
                if time.monotonic() >= ends_at:
                    return False
                self._idle.wait(STOP_LOOK_S)
        return True

    @contextmanager
    def call(self, what: str) -> Iterator[None]:
        """Count a call and turn what goes wrong in it into what may cross the wire."""
        with self._idle:
            is_overloaded = self._num_calls >= MAX_CALLS
            self._num_calls += 1
        try:
            if is_overloaded:
                raise OverloadedError(
                    f"server: calls in progress must be at most {MAX_CALLS}, got one more; ask again later"
                )
            yield
        except TableNotFoundError as error:
            raise _wire_error(error if self._tells_tables else _NOT_FOUND) from None
        except FlightQueueError as error:
            raise _wire_error(error) from None
        except (pa.ArrowException, paflight.FlightError) as error:
            problem: FlightQueueError
            if isinstance(error, paflight.FlightCancelledError):
                problem = UnavailableError(
                    f"{what}: the caller must wait for the answer, got a cancelled call"
                )
            else:
                problem = InvalidRequestError(
                    f"{what}: data must be a valid Arrow stream, got: {first_line(error)}"
                )
            raise _wire_error(problem) from None
        except Exception:
            LOG.exception("unexpected error", call=what)
            raise _wire_error(FlightQueueError(f"{what}: the server failed, see its log")) from None
        finally:
            with self._idle:
                self._num_calls -= 1
                self._idle.notify_all()


def next_chunk(
    reader: paflight.MetadataRecordBatchReader, idle: OpenPut
) -> paflight.FlightStreamChunk | None:
    """Read what the caller says next, None at the end; the time until then is its silence.

    Raises:
        InvalidRequestError: it is no Arrow stream.
    """
    with idle.waiting_for_caller():
        try:
            return reader.read_chunk()
        except StopIteration:
            return None
        except FlightQueueError:  # Some of ours are OSErrors, too.
            raise
        except OSError as error:  # Arrow's word for a message that it cannot read.
            raise InvalidRequestError(
                f"{idle.what}: data must be a valid Arrow stream, got: {first_line(error)}"
            ) from error


def _wire_error(error: FlightQueueError) -> paflight.FlightServerError:
    message, detail = m.error_detail(error)
    return paflight.FlightServerError(message, extra_info=detail)


def first_line(error: Exception) -> str:
    """Return what may be told of an error of Arrow."""
    return str(error).partition("\n")[0][:300]
