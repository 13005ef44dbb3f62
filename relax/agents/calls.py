"""Calls of code that is not ours, side by side and each with a time limit. A thread that hangs is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from relax.errors import HopelessError

MAX_LEFT_BEHIND = 64
"""Hanging threads with which a service goes on; each keeps its memory until it ends."""


@dataclass(frozen=True)
class Answer:
    """What a call returned, or why it did not."""

    value: Any = None
    error: str = ""


class BoundedCalls:
    """Runs functions in threads.

    Args:
        max_parallel: Calls at the same time.
        limit_s: Longest time of one call in seconds.
    """

    def __init__(self, max_parallel: int, limit_s: float) -> None:
        self._max_parallel = max_parallel
        self._limit_s = limit_s
        self._left_behind: list[threading.Thread] = []

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Answer]:
        """Return what each call returned, in order; what a call raises, and that it took too long, is its error.

        Raises:
            HopelessError: too many calls of this and earlier runs hang.
        """
        answers: list[Answer] = []
        for start in range(0, len(calls), self._max_parallel):
            answers += self._together(calls[start : start + self._max_parallel])
        self._left_behind = [thread for thread in self._left_behind if thread.is_alive()]
        if len(self._left_behind) > MAX_LEFT_BEHIND:
            raise HopelessError(
                f"agents: calls of the environment must end within {self._limit_s:g} s, got "
                f"{len(self._left_behind)} that hang"
            )
        return answers

    def _together(self, calls: Sequence[Callable[[], Any]]) -> list[Answer]:
        found: list[Answer | None] = [None] * len(calls)

        def call(index: int) -> None:
            try:
                found[index] = Answer(calls[index]())
            except BaseException as error:  # a call must never end the thread unheard, SystemExit included
                found[index] = Answer(error=f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(calls))]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + self._limit_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._left_behind += [thread for thread in threads if thread.is_alive()]
        late = Answer(error=f"must answer within {self._limit_s:g} s, got no end")
        return [answer or late for answer in list(found)]
