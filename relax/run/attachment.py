"""Attaching a run to a queue server that was there before it. It creates no table; it says who may."""

from __future__ import annotations

from collections.abc import Iterable

from flight.client import QueueClient
from flight.errors import FlightQueueError
from relax.errors import ConfigError

ANSWER_DEADLINE_S = 5.0


def check_server(uri: str, tables: Iterable[str], *, overwrite: bool) -> None:
    """Check that the server answers and has none of `tables`; with `overwrite`, drop those that it has.

    Tables of another run hold rows, seals and policy versions that would mix with this run's, and nothing tells
    whether that run has ended: so it is the user who decides.

    Raises:
        ConfigError: no server answers, or it has tables of these names.
    """
    try:
        with QueueClient(uri, identity="driver", deadline_s=ANSWER_DEADLINE_S) as queue:
            found = sorted(set(queue.list_tables()) & set(tables))
            if found and not overwrite:
                raise ConfigError(
                    f"queue.uri: {uri} must hold no table of another run, got {', '.join(found)}; wait until that "
                    "run has ended, or drop what it left with overwrite=true"
                )
            for name in found:
                queue.drop_table(name)
    except FlightQueueError as error:
        raise ConfigError(f"queue.uri: {error}") from error
