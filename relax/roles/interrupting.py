"""Ends a generate call in its middle: new weights are there, the service has to leave, or it takes too long.

A thread looks while the call is under way and aborts the engine, which returns what it has. It also keeps the lease of
the prompts alive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from relax.rollout.engine import RolloutEngine

LOOK_S = 0.05
END_S = 15.0


@contextmanager
def interrupted_when(
    engine: RolloutEngine,
    is_due: Callable[[], bool],
    *,
    timeout_s: float,
    beat: Callable[[], None],
    beat_s: float,
) -> Iterator[None]:
    """Abort what the engine is at inside the block as soon as `is_due()`, or `timeout_s` have passed (0: never).

    An abort that comes before the call has begun is lost, so it is repeated until the block ends; none comes after it.

    Args:
        engine: Its `generate` is called inside the block.
        is_due: Asked from another thread, many times a second.
        timeout_s: Seconds.
        beat: Called every `beat_s` seconds, from another thread.
        beat_s: Seconds.
    """
    over = threading.Event()
    turn = threading.Lock()

    def watch() -> None:
        started = beaten = time.monotonic()
        while not over.wait(LOOK_S):
            now = time.monotonic()
            if now - beaten > beat_s:
                beaten = now
                beat()
            if is_due() or (timeout_s and now - started > timeout_s):
                with turn:
                    if not over.is_set():
                        engine.abort()

    thread = threading.Thread(target=watch, name="interrupt", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with turn:  # an abort under way ends before the next call begins
            over.set()
        thread.join(END_S)
