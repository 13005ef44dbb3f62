"""Ends the samples of a group that are still on their way at servers once enough of them have finished.

    asking (rid, server) ...    finished(n) -> enough: abort what is still asked     result(future): abort until it ends

An abort that overtakes its request is lost, so it is repeated while somebody waits for the request.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress

from relax.errors import ServiceError
from relax.rollout.engine import Completion
from relax.rollout.sglang_http import SGLangClient

REPEAT_S = 1.0


class EarlyStop:
    """One group. Safe for several threads.

    Args:
        num_wanted: Samples that are enough; 0: all are wanted, and nothing is ever aborted.
        num_finished: Samples that were finished before.
    """

    def __init__(self, num_wanted: int, num_finished: int = 0) -> None:
        self._num_wanted = num_wanted
        self._num_finished = num_finished
        self._asked: dict[str, SGLangClient] = {}
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        """Whether no further sample is wanted."""
        return bool(self._num_wanted) and self._num_finished >= self._num_wanted

    @contextmanager
    def asking(self, rid: str | None, client: SGLangClient) -> Iterator[None]:
        """Note that a server is at work on a request inside the block; one without a name cannot be aborted."""
        if rid is not None:
            with self._lock:
                self._asked[rid] = client
        try:
            yield
        finally:
            if rid is not None:
                with self._lock:
                    del self._asked[rid]

    def finished(self, num_samples: int) -> None:
        """Note samples that have finished; abort the others if they are enough."""
        with self._lock:
            self._num_finished += num_samples
        self._abort_rest()

    def result(self, future: Future[list[Completion]]) -> list[Completion]:
        """Return what a request came to; blocks, and aborts it again and again once it is not wanted any more.

        Raises:
            ServiceError: It failed.
        """
        while self._num_wanted and not wait([future], REPEAT_S).done:
            self._abort_rest()
        return future.result()

    def _abort_rest(self) -> None:
        if not self.is_over:
            return
        with self._lock:
            asked = dict(self._asked)
        for rid, client in asked.items():
            with suppress(ServiceError):  # its server is gone, and with it the request
                client.tell("/abort_request", {"rid": rid})
