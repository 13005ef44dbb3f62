"""Ends what an engine is at when the run goes back to a checkpoint, so that nobody waits for answers that are void."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from relax.roles.service import Service
from relax.rollout.engine import RolloutEngine

LOOK_S = 1.0
END_S = 5.0


@contextmanager
def abort_when_gone_back(service: Service, engine: RolloutEngine) -> Iterator[None]:
    """Watch the course of the run inside the block, in a thread; abort generation that an earlier one asked for."""
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if service.control.wait_for(lambda: over.is_set() or service.has_gone_back, LOOK_S):
                engine.abort()
            over.wait(LOOK_S / 10)  # until the service has followed

    thread = threading.Thread(target=watch, name="abort-when-gone-back", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(END_S)
