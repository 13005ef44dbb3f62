"""Attaching a run to a queue server that was there before it. It creates no table; it says who may."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flight.client import QueueClient
from flight.errors import FlightQueueError
from relax.errors import ConfigError

ANSWER_DEADLINE_S = 5.0


def check_server(
    uri: str, tables: Sequence[str], *, overwrite: bool, credentials: Path | None = None
) -> None:
    """Check that the server answers and has none of `tables`; with `overwrite`, drop those that it has, last first.

    Tables of another run hold rows, seals and policy versions that would mix with this run's, and nothing tells
    whether that run has ended: so it is the user who decides.

    Raises:
        ConfigError: no server answers, or it has tables of these names.
    """
    try:
        with QueueClient(
            uri, identity="driver", deadline_s=ANSWER_DEADLINE_S, credentials=credentials
        ) as queue:
            there = queue.list_tables()
            found = [name for name in reversed(tables) if name in there]
            if found and not overwrite:
                raise ConfigError(
                    f"queue.uri: {uri} must hold no table of another run, got {', '.join(sorted(found))}; wait until "
                    "that run has ended, or drop what it left with overwrite=true"
                )
            for name in found:
                queue.drop_table(name)
    except FlightQueueError as error:
        raise ConfigError(f"queue.uri: {error}") from error
